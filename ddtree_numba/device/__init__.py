"""The lowest floor: backend, arrays, launches, number formats. Knows no operator."""
