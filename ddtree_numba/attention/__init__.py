"""Tree-verify attention: one operator, its variants side by side."""
