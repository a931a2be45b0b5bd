"""The decode loop on a small model: the same tokens in every mode, and each part against something simpler."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from decode_cases import CONTEXT, EOS, TOKENS, reference_logits, write_model
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_numba import DecodeStep, DraftTree, mask_from_parents
from ddtree_numba.__main__ import main
from ddtree_numba.decode import PromptLookup, decode, load, logit_gap
from ddtree_numba.decode.mirror_step import MirrorStep
from ddtree_numba.device.runtime import SIMULATOR
from ddtree_numba.tree.draft_tree import DTYPES

PROMPTS = [list(b"the cat the cat the"), list(b"12 12 12 1"), [7], list(range(40, 90))]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "small.gguf")


@pytest.fixture(scope="module")
def loaded(path):
    return load(path, "numpy")


def greedy(prompt: list[int], count: int) -> list[int]:
    """The reference's likeliest tokens, until the reply ends."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count and ids[len(prompt) :][-1:] != [EOS]:
        ids.append(int(reference_logits(ids)[-1].argmax()))
    return ids[len(prompt) :]


# The model


@pytest.mark.parametrize("through", ["plain", "three_phase_numpy", "flash_numpy"])
def test_logits_are_the_references(loaded, through):
    model, ids = loaded.model, PROMPTS[3]
    caches, found, cuts = model.new_caches(1, len(ids)), [], [0, 17, 18, len(ids)]
    for first, stop in zip(cuts, cuts[1:], strict=False):
        lengths = np.array([first], np.int32)
        part = np.array([ids[first:stop]], np.int32)
        attend = (
            model.attend_plainly(caches, lengths)
            if through == "plain"
            else model.attend_tree(caches, lengths, None, through)
        )
        found.append(model.logits(part, first + np.arange(part.shape[1])[None], attend)[0])
    wanted = reference_logits(ids)
    assert np.ptp(wanted, axis=1).min() > 20, "flat logits prove nothing"
    np.testing.assert_allclose(np.concatenate(found), wanted, atol=2e-4)


def test_a_node_of_a_tree_has_the_logits_of_its_path(loaded):
    model, prompt = loaded.model, PROMPTS[0]
    parents = np.array([-1, 0, 0, 1, 1, 2, 3, 5])
    tokens = np.array([prompt[-1], 9, 8, 7, 9, 9, 30, 31])
    depths = np.array([0, 1, 1, 2, 2, 2, 3, 3])
    caches, length = model.new_caches(1, 64), len(prompt) - 1
    start = np.zeros(1, np.int32)
    model.hidden(np.array([prompt[:-1]]), np.arange(length)[None], model.attend_plainly(caches, start))
    attend = model.attend_tree(
        caches, np.array([length], np.int32), mask_from_parents(parents)[None], "three_phase_numpy"
    )
    found = model.logits(tokens[None], length + depths[None], attend)[0]
    for node in range(len(parents)):
        branch = [node]
        while parents[branch[-1]] >= 0:
            branch.append(parents[branch[-1]])
        wanted = reference_logits(prompt[:-1] + tokens[branch[::-1]].tolist())[-1]
        np.testing.assert_allclose(found[node], wanted, atol=2e-4)


# The loop


@pytest.mark.parametrize("mode", ["autoregressive", "chain", "tree"])
def test_replies_are_the_references_greedy_tokens(loaded, mode):
    replies = decode(PROMPTS, loaded=loaded, mode=mode, budget=7, draft_positions=4, max_tokens=12)
    for prompt, reply in zip(PROMPTS, replies, strict=True):
        assert reply.tokens == greedy(prompt, 12)
        assert reply.stopped == (reply.tokens[-1] == EOS)
        assert sum(reply.runs) >= len(reply.tokens) > 0 and reply.text == loaded.tokenizer.decode(reply.tokens)
    assert (max(max(reply.runs) for reply in replies) == 1) == (mode == "autoregressive")
    assert set(replies[0].stages) == {"draft", "build", "verify", "accept"} and replies[0].seconds > 0


def test_a_drafter_that_knows_the_reply_is_believed_and_one_that_is_wrong_costs_nothing(loaded):
    prompt, count = PROMPTS[0], 11
    reply = greedy(prompt, count)
    assert len(reply) == count

    def knows(contexts, draft_positions, vocabulary):
        logits = np.full((len(contexts), draft_positions, vocabulary), -9, np.float32)
        for b, context in enumerate(contexts):
            coming = (prompt + reply)[len(context) :][:draft_positions]
            logits[b, np.arange(len(coming)), coming] = 0
        return logits

    def is_wrong(*arguments):
        return -knows(*arguments)

    (fast,) = decode([prompt], loaded=loaded, budget=5, draft_positions=5, max_tokens=count, drafter=knows)
    (slow,) = decode([prompt], loaded=loaded, budget=5, draft_positions=5, max_tokens=count, drafter=is_wrong)
    assert fast.tokens == slow.tokens == reply
    assert fast.runs[:1] == [6] and len(fast.runs) == 2
    assert slow.runs == [1] * count and slow.acceptance_length == 1


def test_samples_are_the_same_in_every_mode_and_of_their_seed(loaded):
    settings = {"loaded": loaded, "temperature": 1.5, "top_k": 20, "top_p": 0.9, "max_tokens": 10}
    plain = [reply.tokens for reply in decode(PROMPTS, mode="autoregressive", seed=3, **settings)]
    assert [reply.tokens for reply in decode(PROMPTS, mode="tree", seed=3, **settings)] == plain
    (alone,) = decode(PROMPTS[1:2], mode="chain", budget=3, seed=4, **settings)
    assert alone.tokens == plain[1], "the second prompt of a batch has the next seed"
    assert [reply.tokens for reply in decode(PROMPTS, mode="autoregressive", seed=4, **settings)] != plain


def test_tokens_are_reported_as_they_come(loaded):
    seen: dict[int, list[int]] = {}

    def on_tokens(prompt, tokens, num_accepted):
        assert len(tokens) <= num_accepted
        seen.setdefault(prompt, []).extend(tokens)

    replies = decode(PROMPTS, loaded=loaded, max_tokens=5, on_tokens=on_tokens)
    assert [seen[n] for n in range(len(PROMPTS))] == [reply.tokens for reply in replies]


def test_no_prompts_give_no_replies(loaded):
    assert decode([], loaded=loaded) == []


def test_the_end_token_ends_a_reply(loaded):
    prompts = [[token] for token in range(3, 60)]
    replies = decode(prompts, loaded=loaded, mode="autoregressive", max_tokens=20)
    ended = [n for n, reply in enumerate(replies) if reply.stopped][:3]
    assert ended, "no short prompt makes this model end"
    assert not any(EOS in reply.tokens[:-1] for reply in replies)
    for n, reply in zip(ended, decode([prompts[n] for n in ended], loaded=loaded, max_tokens=20), strict=True):
        assert reply.tokens == replies[n].tokens == greedy(prompts[n], 20)
        assert reply.stopped and reply.tokens[-1] == EOS and len(reply.tokens) < 20


@pytest.mark.parametrize(
    "message, changed",
    [
        ("mode is 'beam'; it must be one of", {"mode": "beam"}),
        ("budget is 0", {"budget": 0}),
        ("draft_positions is -1", {"draft_positions": -1}),
        ("max_tokens is 0", {"max_tokens": 0}),
        ("temperature is -1", {"temperature": -1}),
        ("temperature is nan", {"temperature": float("nan")}),
        ("temperature is inf", {"temperature": float("inf")}),
        ("top_p is 0", {"top_p": 0, "temperature": 1}),
        ("top_p is 1.5", {"top_p": 1.5, "temperature": 1}),
        ("a prompt has no tokens", {"prompts": [[5], []]}),
        ("a prompt has no tokens", {"prompts": "", "chat": False}),
        ("a prompt holds the token -1; tokens are 0 to", {"prompts": [[5, -1]]}),
        (f"a prompt holds the token {len(TOKENS)}", {"prompts": [[len(TOKENS)]]}),
        (f"needs {300 + 64 + 16} with max_tokens and budget; at most {CONTEXT} fit", {"prompts": [[5] * 300]}),
    ],
)
def test_wrong_arguments_are_refused(loaded, message, changed):
    given = {"prompts": "hello", "loaded": loaded, **changed}
    with pytest.raises(ValueError, match=message):
        decode(given.pop("prompts"), **given)


def test_backends(monkeypatch):
    with pytest.raises(ValueError, match="backend is 'tpu'; it must be one of 'auto', 'cuda', 'numpy'"):
        load("x", "tpu")
    monkeypatch.setattr("ddtree_numba.device.runtime.has_gpu", lambda: False)
    with pytest.raises(RuntimeError, match='backend="cuda" needs a GPU: '):
        load("x", "cuda")


def test_a_tie_has_no_gap(loaded, monkeypatch):
    ids = PROMPTS[0]
    logits = np.sort(reference_logits(ids)[-1])
    assert logit_gap(loaded.model, ids) == pytest.approx(logits[-1] - logits[-2], abs=4e-4)
    second = reference_logits(ids)[-1].argsort()[-2:]
    embedding = loaded.model.head.copy()
    embedding[second[0]] = embedding[second[1]]
    monkeypatch.setattr(loaded.model, "head", embedding)
    assert logit_gap(loaded.model, ids) == 0


# The step


@pytest.mark.skipif(not SIMULATOR, reason="host arrays run on the GPU there; test_decode_gpu.py has this with its own")
@pytest.mark.parametrize("sampled", [False, True])
def test_the_mirrors_step_is_decode_step(sampled):
    rng = np.random.default_rng(8)
    batch, draft_positions, vocabulary, budget = 4, 3, 40, 6
    sizes = dict(batch=batch, draft_positions=draft_positions, vocabulary=vocabulary, tree_budget=budget)
    draft = rng.standard_normal((batch, draft_positions, vocabulary)).astype(np.float32)
    logits = 3 * rng.standard_normal((batch, budget + 1, vocabulary)).astype(np.float32)
    caches = [rng.standard_normal((batch, 20, 4)).astype(np.float32) for _ in range(2)]
    controls = {}
    if sampled:
        floats = {"temperature": np.full(batch, 0.7, np.float32), "top_p": np.full(batch, 0.9, np.float32)}
        controls = {"seeds": np.arange(batch, dtype=np.int64), "top_k": np.full(batch, 9, np.int32), **floats}
    found = []
    for step_class in (DecodeStep, MirrorStep):
        step = step_class(np.zeros(1, np.float32), sampled=sampled, stop_tokens=[3, 5], **sizes)
        roots, lengths = np.array([4, -1, 2, 6], np.int32), np.array([5, 4, 13, 14], np.int32)  # the last has no room
        mine = [cache.copy() for cache in caches]
        given = []

        def forward(tree, positions, live_lengths, given=given):
            likely = logits.copy()
            likely[:, np.arange(budget), :] += 4 * (np.arange(vocabulary) == tree.tokens[:, 1:, None])
            given += [positions.copy(), live_lengths.copy()]
            return likely

        step(draft, roots, lengths, forward, kv_caches=mine, **controls)
        tree = [getattr(step.tree, name).copy() for name in DTYPES]
        path = [getattr(step.accepted, name) for name in ("nodes", "num_accepted", "bonus_tokens", "flags", "tokens")]
        found.append([*tree, *given, *path, roots, lengths, *mine])
    for kernel, mirror in zip(*found, strict=True):
        np.testing.assert_array_equal(mirror, kernel)
    assert isinstance(step.tree, DraftTree) and found[1][-4][1] == found[1][-4][3] == -1
    assert step.accepted.num_accepted.max() > 1


# The drafter


def test_prompt_lookup_follows_the_longest_match():
    context = [1, 2, 3, 4, 9, 3, 5, 1, 2, 3]
    logits = PromptLookup()([context], 3, 12)[0]
    assert logits.argmax(axis=1).tolist() == [4, 9, 3]
    assert logits[0].argsort()[-2] == 5, "what stood behind the last token alone comes second"
    (second,) = PromptLookup(longest=1)([context], 1, 12)[0]
    assert second[4] == second[5], "both stood behind a 3"


def test_prompt_lookup_takes_any_context():
    for context in ([4], [4, 4], [4, 5]):
        logits = PromptLookup()([context], 2, 6)
        assert logits.shape == (1, 2, 6) and np.isfinite(logits).all() and logits[0, 1].argmax() in context
    with pytest.raises(ValueError, match="longest is 0"):
        PromptLookup(longest=0)


# The tokenizer


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_texts_come_back(loaded, text):
    tokenizer = loaded.tokenizer
    ids = tokenizer.encode(text)
    if not any(token in text for token in TOKENS[:3]):
        assert tokenizer.decode(ids) == text
        pieces = tokenizer.stream()
        assert "".join(pieces(token) for token in ids) == text


def test_digits_stand_alone_and_control_tokens_are_one(loaded):
    tokenizer = loaded.tokenizer
    assert [TOKENS[token] for token in tokenizer.encode("in the 12")] == ["in", "Ġthe", "Ġ", "1", "2"]
    assert tokenizer.encode("<|im_end|>") == [EOS] and tokenizer.decode([EOS]) == ""
    chat = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.chat("hello") == chat


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"architecture": "gpt2"}, "the file holds a model of architecture gpt2"),
        ({"pre": "llama-bpe"}, "the file's tokenizer is gpt2/llama-bpe"),
    ],
)
def test_another_model_is_refused(tmp_path, changed, message):
    with pytest.raises(ValueError, match=message):
        load(write_model(tmp_path / "other.gguf", **changed), "numpy")


# The command


def test_the_command_prints_a_reply_and_proves_it(path, loaded, capsys):
    given = ["decode", "--model", str(path), "--backend", "numpy", "--prompt", "the cat", "--max-tokens", "9"]
    assert main(given) == 0
    out = capsys.readouterr().out
    (reply,) = decode("the cat", loaded=loaded, max_tokens=9)
    assert reply.text.rstrip("\ufffd") in out  # the last letter may lack bytes, which a stream waits for
    assert f"the same {len(reply.tokens)} tokens as one token a step gives" in out
    assert f"{reply.acceptance_length:.2f}" in out and "verify " in out


def test_the_command_as_json_with_a_picture(path, tmp_path, capsys):
    given = ["decode", "--model", str(path), "--backend", "numpy", "--json", "--max-tokens", "6", "--mode", "chain"]
    given += ["--prompt", "a", "--prompt", "12 12 ", "--raw", "--plot", str(tmp_path / "tree.svg")]
    assert main(given) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same"] is True and len(found["replies"]) == len(found["verdicts"]) == 2
    fields = {"tokens", "text", "acceptance_length", "tokens_per_second", "stages"}
    assert all(fields <= reply.keys() for reply in found["replies"])
    assert "acceptance length" in (tmp_path / "tree.svg").read_text(encoding="utf-8")


def test_the_command_sees_other_tokens(path, capsys, monkeypatch):
    from ddtree_numba.decode import cli

    real = cli.decode

    def wrong(*arguments, mode, **settings):
        replies = real(*arguments, mode=mode, **settings)
        if mode == "tree":
            replies[0].tokens[2] ^= 1
        return replies

    monkeypatch.setattr(cli, "decode", wrong)
    given = ["decode", "--model", str(path), "--backend", "numpy", "--prompt", "the cat", "--max-tokens", "6"]
    assert main(given) == 1
    assert "differs from token 3 on, where the two likeliest logits are" in capsys.readouterr().out
    monkeypatch.setattr(cli, "logit_gap", lambda *_: 1e-5)
    assert main(given) == 0
    assert "a near-tie, which rounding decides" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changed, message",
    [
        (["--model", "missing.gguf"], "error: there is no model file missing.gguf"),
        (["--budget", "0"], "error: budget is 0"),
        (["--model", __file__], "error: "),
    ],
)
def test_the_command_says_what_is_wrong(path, capsys, changed, message):
    assert main(["decode", "--model", str(path), "--backend", "numpy", "--prompt", "x", *changed]) == 1
    assert message in capsys.readouterr().err


def test_without_the_extra_the_command_says_what_to_install(path):
    code = (
        "import sys; sys.modules['gguf'] = None; from ddtree_numba.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "decode", "--model", str(path), "--backend", "numpy", "--prompt", "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and 'pip install "ddtree-numba[decode]"' in done.stderr
