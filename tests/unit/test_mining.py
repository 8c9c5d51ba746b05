"""Mining: the labels that the procedure gives, on a case worked by hand and against the slow way."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from dropmatch.core.interfaces import ModelOutput
from dropmatch.errors import ConfigError
from dropmatch.judge.features import draft_token_states
from dropmatch.judge.mining import Label, Mined, Miner, MiningPrompt
from scripted import ScriptedModel, TableHead

V, EOS = 16, 0


def decode(ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token) for token in ids if token != EOS)


class LastGrader:
    """What an answer comes to: its last letter but one, as a number stands at the end of a text. Counts the calls."""

    def __init__(self) -> None:
        self.graded: list[tuple[str, str]] = []

    def grade(self, answers: Sequence[tuple[str, str]]) -> list[str]:
        self.graded += answers
        return [text[-2:-1] for _, text in answers]

    def same(self, key: str, reference: object, other: object) -> bool:
        return reference == other


class BookModel(ScriptedModel):
    """A model that says what the test wrote down: book(answer so far) -> token, for prompts of one token."""

    def __init__(self, book: object) -> None:
        super().__init__(V, V)
        self.book = book
        self.head = TableHead(torch.eye(V))

    def state(self, prefix: Sequence[int]) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(self.book(tuple(prefix[1:]))), V).float()


def miner(target: ScriptedModel, draft: ScriptedModel, grader: object, **options: object) -> Miner:
    def new_draft() -> ScriptedModel:
        made = object.__new__(type(draft))
        made.__dict__ = {**draft.__dict__, "rows": [], "_pending": []}
        return made

    settings = {"decode": decode, "eos_ids": frozenset({EOS}), **options}
    return Miner(target, new_draft, grader, **settings)


# --- by hand ---

# The target answers 1 2 3 4 5 E. Said after an exchange, it goes on as written; by default it counts up to 5.
TARGET_BOOK = {
    (9,): 2, (9, 2): 3, (9, 2, 3): 4, (9, 2, 3, 4): 5, (9, 2, 3, 4, 5): EOS,  # ends on 4 5 as before: unimportant
    (9, 2, 8): 7, (9, 2, 8, 7): 5, (9, 2, 8, 7, 5): EOS,  # ends on 7 5: important
    (9, 2, 3, 4, 6): EOS,  # the last letter but one is still 4: unimportant
}  # fmt: skip
DRAFT_BOOK = {
    (): 9,  # parts at once; and (1,) is never asked, since 9 stays
    (9, 2): 8,  # parts from 3; after the answer 9 2 8 7 5 the old one is kept
    (9, 2, 3, 4): 6,
    (9, 2, 3, 4, 6): 11,  # parts from the end; 11 goes on without end and is cut by the limit
}


def _target_says(said: tuple[int, ...]) -> int:
    if said in TARGET_BOOK:
        return TARGET_BOOK[said]
    if said[:6] == (9, 2, 3, 4, 6, 11):
        return 11
    return said[-1] + 1 if said and said[-1] < 5 else EOS if said else 1


def _draft_says(said: tuple[int, ...]) -> int:
    return DRAFT_BOOK.get(said, _target_says(said))


@pytest.mark.parametrize("draft_length", [0, 1, 6])
def test_a_case_worked_by_hand(draft_length: int) -> None:
    grader = LastGrader()
    (mined,) = miner(BookModel(_target_says), BookModel(_draft_says), grader, draft_length=draft_length).run(
        [MiningPrompt("only", (13,), 10)]
    )
    assert mined.reference == [1, 2, 3, 4, 5, EOS]
    assert mined.labels == [
        Label(0, False, 1, 9),  # 9 2 3 4 5 E ends as the reference does, and stays
        Label(2, True, 3, 8),  # 9 2 8 7 5 E does not
        Label(4, False, 5, 6),  # 9 2 3 4 6 E does
        Label(5, True, EOS, 11),  # 9 2 3 4 6 11 11 11 11 11 does not
    ]
    assert mined.response == [9, 2, 3, 4, 6, EOS]
    texts = [text for _, text in grader.graded]
    assert texts == [decode(x) for x in ([1, 2, 3, 4, 5], [9, 2, 3, 4, 5], [9, 2, 8, 7, 5], [9, 2, 3, 4, 6],
                                         [9, 2, 3, 4, 6, 11, 11, 11, 11, 11])]  # fmt: skip
    assert mined.rollouts == 4


def test_a_draft_that_ends_early_ends_the_answer_there() -> None:
    """The draft's end of sequence is a mismatch like others: nothing is written behind it."""
    grader = LastGrader()
    draft = BookModel(lambda said: EOS if said == (1, 2) else _target_says(said))
    (mined,) = miner(BookModel(_target_says), draft, grader).run([MiningPrompt("only", (13,), 10)])
    assert mined.labels == [Label(2, True, 3, EOS)]
    assert [text for _, text in grader.graded] == ["bcdef", "bc"]
    assert mined.response == mined.reference == [1, 2, 3, 4, 5, EOS]
    grader.same = lambda *_: True  # the short answer counts as good: it stays, and nothing is left to compare
    (mined,) = miner(BookModel(_target_says), draft, grader).run([MiningPrompt("only", (13,), 10)])
    assert mined.labels == [Label(2, False, 3, EOS)]
    assert mined.response == [1, 2, EOS]


def test_a_stop_string_ends_answers_and_is_no_part_of_them() -> None:
    grader = LastGrader()
    draft = BookModel(lambda said: 8 if said == (1,) else _target_says(said))
    (mined,) = miner(BookModel(_target_says), draft, grader).run([MiningPrompt("only", (13,), 10, ("e",))])
    assert mined.reference == [1, 2, 3, 4]
    assert grader.graded[0][1] == "bcd"


def test_equal_models_have_no_mismatches() -> None:
    grader = LastGrader()
    (mined,) = miner(ScriptedModel(V), ScriptedModel(V), grader).run([MiningPrompt("x", (1, 2), 30)])
    assert mined.labels == []
    assert mined.reference == mined.response == _greedy(ScriptedModel(V), [1, 2], 30)


# --- against the slow way ---


def _greedy(model: ScriptedModel, prompt: Sequence[int], limit: int) -> list[int]:
    answer: list[int] = []
    while len(answer) < limit and EOS not in answer:
        answer.append(int(model.head(model.state([*prompt, *answer])).argmax()))
    return answer


def _slowly(
    target: ScriptedModel, draft: ScriptedModel, prompt: Sequence[int], limit: int, grader: LastGrader
) -> tuple[list[Label], list[int]]:
    """The procedure word by word, each step from scratch."""
    y, labels, start = _greedy(target, prompt, limit), [], 0
    (reference,) = grader.grade([("x", decode(y))])
    while True:
        d = [int(draft.head(draft.state([*prompt, *y[:j]])).argmax()) for j in range(len(y))]
        j = next((j for j in range(start, len(y)) if y[j] != d[j]), None)
        if j is None:
            return labels, y
        z = [*y[:j], d[j]]
        if d[j] != EOS:
            z += _greedy(target, [*prompt, *z], max(1, limit - len(z)))
        (outcome,) = grader.grade([("x", decode(z))])
        labels.append(Label(j, outcome != reference, y[j], d[j]))
        if outcome == reference:
            y = z
        start = j + 1


PROMPTS = [MiningPrompt(f"p{i}", (i + 1, (5 * i) % V, 3), 12 + 7 * (i % 3)) for i in range(9)]


@pytest.mark.parametrize("batch", [1, 4, 9])
@pytest.mark.parametrize("draft_length", [0, 3, 8])
def test_batched_mining_equals_the_slow_way(batch: int, draft_length: int) -> None:
    target, draft = ScriptedModel(V, seed=1), ScriptedModel(V, seed=1, noise=0.5)
    made = miner(ScriptedModel(V, seed=1), draft, LastGrader(), batch=batch, draft_length=draft_length)
    by_key = {mined.prompt.key: mined for mined in made.run(PROMPTS)}
    assert len(by_key) == len(PROMPTS)
    for prompt in PROMPTS:
        labels, response = _slowly(target, draft, prompt.ids, prompt.max_new_tokens, LastGrader())
        assert by_key[prompt.key].labels == labels
        assert by_key[prompt.key].response == response
    every = [label for mined in by_key.values() for label in mined.labels]
    assert {label.is_important for label in every} == {True, False}
    assert made.rollouts == len(every)
    assert made.generated == sum(mined.generated for mined in by_key.values())


def test_the_old_answer_as_a_draft_and_the_batch_save_forwards() -> None:
    def rounds(**options: int) -> int:
        draft = ScriptedModel(V, seed=1, noise=0.3)
        made = miner(_Forgetful(), draft, LastGrader(), **options)
        list(made.run(PROMPTS))
        return made.rounds

    alone = rounds(batch=1, draft_length=0)
    assert rounds(batch=9, draft_length=0) < alone / 3
    assert rounds(batch=1, draft_length=6) < alone / 2


class _Forgetful(ScriptedModel):
    """A target that looks at its last token only, so that an answer goes on as before after an exchange."""

    def __init__(self) -> None:
        super().__init__(V, seed=1)

    def state(self, prefix: Sequence[int]) -> torch.Tensor:
        return super().state(prefix[-1:])


def test_prompts_are_read_once() -> None:
    """Rows stay in the cache between steps: the target reads each prompt once, and then only what is new."""
    read: list[int] = []

    class Counting(ScriptedModel):
        def add_rows(self, prompts: Sequence[Sequence[int]]) -> ModelOutput:
            read.extend(map(len, prompts))
            return super().add_rows(prompts)

    made = miner(Counting(V, seed=1), ScriptedModel(V, seed=1, noise=0.5), LastGrader(), batch=3)
    assert sum(len(mined.labels) for mined in made.run(PROMPTS)) > len(PROMPTS)
    assert read == [2] * len(PROMPTS)


def test_a_smaller_draft_vocabulary_is_searched_within_what_both_know() -> None:
    draft = ScriptedModel(V - 4, seed=1, noise=0.5)
    every = [mined.labels for mined in miner(ScriptedModel(V, seed=1), draft, LastGrader()).run(PROMPTS)]
    assert all(label.draft_token < V - 4 for labels in every for label in labels)
    assert sum(map(len, every)) > len(PROMPTS)


def test_mismatches_that_are_not_asked_about_keep_the_targets_token() -> None:
    target, draft = ScriptedModel(V, seed=1), ScriptedModel(V, seed=1, noise=0.5)
    made = miner(target, draft, LastGrader(), is_asked=lambda key, position: position % 2 == 0)
    every = list(made.run(PROMPTS))
    assert all(label.position % 2 == 0 for mined in every for label in mined.labels)
    assert any(mined.labels for mined in every)
    (none,) = miner(ScriptedModel(V, seed=1), draft, LastGrader(), is_asked=lambda *_: False).run(PROMPTS[:1])
    assert none.response == none.reference
    assert none.rollouts == 0


def test_a_prompt_without_room_is_named() -> None:
    made = miner(ScriptedModel(V), ScriptedModel(V), LastGrader(), max_length=6)
    with pytest.raises(ConfigError, match=r"long: its prompt of 5 tokens leaves no room.*limit of 6"):
        list(made.run([MiningPrompt("long", (1, 2, 3, 4, 5), 9)]))


def test_answers_stay_below_the_longest_row() -> None:
    made = miner(ScriptedModel(V, seed=1), ScriptedModel(V, seed=1, noise=0.5), LastGrader(), max_length=14)
    for mined in made.run(PROMPTS):
        assert len(mined.reference) <= 10
        assert len(mined.response) <= 11


def test_harmless_exchanges_at_the_end_do_not_outgrow_the_longest_row() -> None:
    class Limited(ScriptedModel):
        def forward(self, tokens: torch.Tensor, ancestors: torch.Tensor | None = None) -> ModelOutput:
            assert all(length < 14 for length in self.lengths), "a token behind the last position"
            return super().forward(tokens, ancestors)

    class Lenient(LastGrader):
        def same(self, key: str, reference: object, other: object) -> bool:
            return True

    made = miner(Limited(V, seed=1), ScriptedModel(V, seed=1, noise=2.0), Lenient(), max_length=14, draft_length=0)
    every = list(made.run(PROMPTS))
    assert max(len(mined.prompt.ids) + len(mined.response) for mined in every) == 15  # the last one is not read


def test_a_run_that_is_given_up_leaves_the_target_empty() -> None:
    target = ScriptedModel(V, seed=1)
    run = miner(target, ScriptedModel(V, seed=1, noise=0.5), LastGrader(), batch=3).run(PROMPTS)
    next(run)
    run.close()
    assert target.rows == []


# --- features ---


@pytest.mark.parametrize("size", [V, V - 4])
def test_states_are_those_behind_the_draft_tokens_at_their_place(size: int) -> None:
    """The model under test may know fewer tokens than the answers hold."""
    model = ScriptedModel(size, seed=3)
    draft = ScriptedModel(V - 4, seed=1, noise=0.5)
    for mined in miner(ScriptedModel(V, seed=1), draft, LastGrader()).run(PROMPTS):
        states = draft_token_states(model, mined)
        assert len(states) == len(mined.labels)
        for label, state in zip(mined.labels, states, strict=True):
            ids = [*mined.prompt.ids, *mined.response[: label.position], label.draft_token]
            assert torch.equal(state, model.state([token if token < size else 0 for token in ids]))
        assert model.rows == []


def test_without_labels_there_are_no_states() -> None:
    assert draft_token_states(ScriptedModel(V), Mined(PROMPTS[0])).shape[0] == 0
