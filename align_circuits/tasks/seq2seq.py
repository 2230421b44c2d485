"""The sequence-to-sequence task of Agarwal & Sarawagi (2025): prompts of known alignment of outputs with inputs."""

import math
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from align_circuits.checks import Tokenizer, check_size, checked
from align_circuits.prompts.prompts import REFERENCES, Prompts
from align_circuits.tasks.alignment_priors import AlignmentKind, PriorForm, sample_alignment
from align_circuits.tasks.automaton import Automata
from align_circuits.tasks.corrupt import Corruption, corrupt_seq2seq
from align_circuits.tasks.gold_relations import LATENT, prompts_of
from align_circuits.tasks.grammar import sample_orders, sample_uniform_orders
from align_circuits.tasks.layout import Layout, Style, layout_of, length_of
from align_circuits.tasks.references import reference_accuracies
from align_circuits.tasks.rng import Rng
from align_circuits.tasks.task import TOKEN_ROLES, Task, check_choices, check_least
from align_circuits.tasks.token_ids import TokenIds, check_text, look_up

CHUNK = 256
"""Prompts drawn at a time, so that automata and intermediate results stay within a few MB."""

MARKER = "!"
"""Written before every symbol and letter in the marked style."""

AutomataScope = Literal["prompt", "task"]


class TranslationTask(Task):
    """What tasks of translation have in common: examples of inputs and of outputs in a known alignment."""

    roles: ClassVar = {
        "align_query": "attends to the input symbol about to be translated",
        "align_key": "attends to the input symbol just translated",
        "lookup": "attends to earlier translations of the same symbol",
        **TOKEN_ROLES,
    }
    references: ClassVar = REFERENCES
    control_lesson: ClassVar = (
        "on prompts with another alignment: they follow a fixed alignment and do not read it from the prompt"
    )

    x_len: int
    phrase_len: int = 1
    n_examples: int
    alignment: Any
    style: Any
    decay: float | None = None
    prior_form: PriorForm = "text"
    task_seed: int
    _no_prior: ClassVar[Mapping[str, Any]] = {}
    """The settings of a task whose alignment has no prior."""

    @property
    def aligned(self) -> tuple[int, ...]:
        """Ã: the input position, from 0, that each phrase translates."""
        return sample_alignment(Rng(self.task_seed, "task"), self.alignment, self.x_len, self.decay, self.prior_form)

    def pairs(self, prompts: Prompts, seed: int = 0) -> tuple[Prompts, Prompts]:
        """Returns clean prompts and the same with another test input; one symbol has no other order."""
        return (prompts, prompts) if self.x_len == 1 else super().pairs(prompts, seed)

    def control(self) -> "TranslationTask | None":
        """Returns the task with a permuted alignment, or with a monotonic one if its own is that or reversed.

        None with one symbol, which has one alignment.
        """
        # Not by the name of the alignment: a prior may draw this permutation too.
        permuted = replace(self, alignment="permutation", **self._no_prior)  # pyright: ignore[reportArgumentType] - a dataclass
        if self.alignment == "reversed" or self.aligned == permuted.aligned:
            permuted = replace(permuted, alignment="monotonic")  # pyright: ignore[reportArgumentType]
        return None if self.aligned == permuted.aligned else permuted

    @property
    def caveats(self) -> tuple[str, ...]:
        """Whether the inputs are too short for a permutation test of alignment."""
        orders = math.factorial(self.x_len)
        # A permutation test cannot find a p below one over the number of orders.
        if orders >= 1 / 0.05:
            return ()
        return (f"{self.x_len} input symbols have {orders} orders, too few to establish an aligner: use 5 or more.",)

    def _corrupted(
        self, prompts: Prompts, kind: Corruption, seed: int, ood: bool, sample_automata: Callable[[Rng, int], Automata]
    ) -> Prompts:
        """What `corrupt` returns."""
        if not len(prompts):
            raise ValueError("no prompts to corrupt: give at least one")
        if prompts.task.get("config") != config_of(self):
            raise ValueError(
                "these prompts were not sampled by this task: corrupt them with the task that sampled them"
            )
        layout = layout_of(self.style, self.x_len, self.phrase_len, self.n_examples, prompts.task["bos"])
        return corrupt_seq2seq(prompts, kind, seed, layout=layout, ood=ood, sample_automata=sample_automata)


@checked
@dataclass(frozen=True)
class Seq2SeqTask(TranslationTask):
    """Translate m symbols into m phrases of c letters, from k examples in the prompt.

    Each symbol has an automaton that writes its phrases; phrase p translates the symbol at input position Ã(p). A model
    that has not seen the automata must read them from the examples, and must infer which symbol is next: the alignment.
    Inputs follow a two-part grammar.

    Lengths 3 and 5 to 8 determine the alignment; at 2 and 4 swapping the two symbols of a part, and their automata, is
    equally likely. A monotonic alignment is a fixed offset too: test claims on `"permutation"` as well.

    Source: The Missing Alignment Link, §3 and App. B.

    >>> from align_circuits.models.tokenizer import char_tokenizer
    >>> task = Seq2SeqTask(x_len=3, phrase_len=2, n_examples=1, separator=";", bos=False)
    >>> task.sample(1, char_tokenizer(), seed=0).text
    ['EPR:bqwsch;PER:qovzch']
    """

    target_name: ClassVar = "The first token of a phrase"
    _no_prior: ClassVar = {"decay": None, "prior_form": "text"}

    x_len: int = 5
    """m: symbols in an input, and phrases in an output."""
    phrase_len: int = 2
    """c: letters in a phrase."""
    n_examples: int = 15
    """k: examples before the test example; with none, only a model that knows the automata can translate."""
    alphabet: str | Sequence[str] = string.ascii_uppercase
    """The characters, or the words in a list, that input symbols are drawn from; each must be one token."""
    letters: str | Sequence[str] = string.ascii_lowercase
    """The characters, or the words in a list, that automata write; each must be one token."""
    alignment: AlignmentKind = "monotonic"
    """How phrases are aligned with input positions; drawn once for the task."""
    decay: float | None = None
    """λ of the alignment prior, from 0 up; only with `alignment="prior"`."""
    prior_form: PriorForm = "text"
    """Eq. 2 of Agarwal and Sarawagi (2025) as printed, or as released, with positions divided by m."""
    automata: AutomataScope = "prompt"
    """`"prompt"`: symbols and automata are new in every prompt (the released data). `"task"`: they are drawn once for
    the task (the paper's text), so that they can be learned in the weights."""
    style: Style = "standard"
    """`"standard"`, `"pre-aligned"` (a copy of its symbol before each phrase), `"marked"` (`!` before every symbol and
    letter)."""
    ood: bool = False
    """Whether the test input is a uniformly random permutation, not an input of the grammar."""
    colon: str = ":"
    """Between input and output."""
    separator: str = "\n"
    """Between examples."""
    bos: bool = True
    """Whether prompts start with the tokenizer's BOS token, where it has one."""
    spaced: bool = True
    """Whether symbols are written with a space before them, so that tokenizing the text gives the tokens (checked)."""
    alphabet_range: tuple[int, int] = (4, 18)
    """The fewest and the most letters that an automaton writes, drawn from `letters` (not from `alphabet`)."""
    state_range: tuple[int, int] = (4, 12)
    """The fewest and the most states of an automaton, the start left out."""
    edge_range: tuple[int, int] = (1, 4)
    """The fewest and the most edges that leave a state."""
    task_seed: int = 0
    """The seed of what all prompts of the task share."""

    def __post_init__(self):
        for name in ("alphabet", "letters"):
            if not isinstance(given := getattr(self, name), str):
                object.__setattr__(self, name, tuple(given))  # a task can be hashed
        _check(self)

    @checked
    def sample(self, n: int, tokenizer: Tokenizer | None = None, seed: int = 0, references: bool = True) -> Prompts:
        """Draws prompts whose targets are the letters of the test example; see `gold_relations.targets_and_relations`.

        The first prompts of a seed are the same however many are drawn.

        Args:
            n: How many prompts.
            tokenizer: The Hugging Face tokenizer whose ids the prompts are made of.
            seed: Which prompts; independent of `task_seed`.
            references: Whether targets carry the reference accuracies `chance`, `memoryless`, `history` and `oracle`
                (see `align_circuits.tasks.references`).

        Raises:
            ValueError: There is no tokenizer, a symbol is not one token of it, or it reads `spaced` text as other
                tokens.
        """
        if n < 1:
            raise ValueError(f"{n} prompts: ask for at least 1")
        length = length_of(self.style, self.x_len, self.phrase_len, self.n_examples, bos=False)
        check_size(
            n * length,
            n * self.x_len * self.phrase_len,
            f"{n:,} prompts of {self.n_examples:,} examples",
            references=True,
        )
        ids, layout = self._in_tokens_of(tokenizer)
        aligned = self.aligned
        rng = Rng(seed, "prompts")
        shared = self._world(Rng(self.task_seed, "task"), 1) if self.automata == "task" else None
        chunks = [self._draw(rng, min(CHUNK, n - start), aligned, shared, references) for start in range(0, n, CHUNK)]
        drawn = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
        return prompts_of(
            ids,
            layout,
            {name: drawn[name] for name in LATENT},
            aligned,
            correct=drawn["correct"],
            references={name: drawn[name] for name in REFERENCES} if references else {},
            task={"name": "seq2seq", "config": config_of(self), "seed": seed},
        )

    @checked
    def corrupt(self, prompts: Prompts, kind: Corruption = "query", *, seed: int = 0) -> Prompts:
        """Returns the corrupted halves of minimal pairs: prompts of equal length that differ in one respect.

        - `"query"`: the test input becomes another input of the grammar (any permutation if `ood`), uniform among those
          that put another symbol at the position of every phrase. Nothing before it changes, and its letters stay. In
          the pre-aligned style the copies of its symbols change with it.
        - `"labels"`: the letters of the examples come from other automata; the test example stays.
        - `"alignment"`: the phrases of each example are reordered, each example on its own, uniformly among the orders
          that contradict the alignment. In the pre-aligned style the copy of its symbol moves with each phrase, so
          that symbols and phrases still belong together.

        Targets, correct answers, references and relations stay those of the clean prompts; `latent` describes the
        corrupted prompts, except for its automata, which stay those that write the test example.

        Args:
            prompts: Prompts that `sample` of this task returned.
            kind: What changes.
            seed: Which change.

        Raises:
            ValueError: There are no prompts, they come from another task or are already corrupted, `kind` is unknown,
                there is only one input (`"query"`, x_len = 1), there are no examples (`"labels"` and `"alignment"`), or
                no order contradicts the alignment (`"alignment"`).
        """
        return self._corrupted(prompts, kind, seed, self.ood, lambda rng, n: self._world(rng, n)[1])

    def _in_tokens_of(self, tokenizer: Any) -> tuple[TokenIds, Layout]:
        """The ids of the task's symbols, and where they stand in a prompt.

        Raises:
            ValueError: The tokenizer does not read them so; the message says if it does with the other `spaced`.
        """
        try:
            return self._spaced_in(tokenizer, self.spaced)
        except ValueError as error:
            try:
                self._spaced_in(tokenizer, not self.spaced)
            except ValueError:
                # With the other setting it is not read either, so spaces are not the cause.
                raise error from None
            unread = ", whose text is not checked to be read as its tokens" if self.spaced else ""
            raise ValueError(f"{error}, or set spaced={not self.spaced}{unread}") from None

    def _spaced_in(self, tokenizer: Any, spaced: bool) -> tuple[TokenIds, Layout]:
        marker = MARKER if self.style == "marked" else ""
        ids = look_up(tokenizer, self.alphabet, self.letters, self.colon, self.separator, marker, spaced)
        bos = self.bos and ids.bos is not None
        layout = layout_of(self.style, self.x_len, self.phrase_len, self.n_examples, bos)
        if spaced:
            check_text(tokenizer, ids, layout)
        return ids, layout

    def _world(self, rng: Rng, n: int) -> tuple[Int[Tensor, "prompt symbol"], Automata]:
        """The symbols, as indices in the alphabet, and the automata of `n` prompts."""
        symbols = rng.order("symbols", n, len(self.alphabet))[:, : self.x_len]
        ranges = (self.alphabet_range, self.state_range, self.edge_range)
        return symbols, Automata.sample(rng, n, self.x_len, len(self.letters), *ranges)

    def _draw(
        self,
        rng: Rng,
        n: int,
        aligned: tuple[int, ...],
        shared: tuple[Int[Tensor, "prompt symbol"], Automata] | None,
        references: bool,
    ) -> dict[str, Tensor]:
        """Draws `n` prompts as indices of symbols and letters: `LATENT`, `correct`, and the references."""
        m, count = self.x_len, self.n_examples + 1
        symbols, automata = shared or self._world(rng, n)
        order = sample_orders(rng, n, count, m)
        if self.ood:
            # Drawn from a generator of its own, over the order of the grammar: the examples are those of the same task
            # in distribution.
            order[:, -1:] = sample_uniform_orders(rng, n, 1, m)
        symbol = order[:, :, aligned]
        phrases, states = automata.walk(symbol, rng.uniform("letters", n, count, m, self.phrase_len))
        tested = symbol[:, -1, :, None].expand(-1, -1, self.phrase_len)
        correct = automata.accepted(tested, states[:, -1], len(self.letters))
        drawn = {
            "symbols": symbols.expand(n, -1),
            "order": order,
            "phrases": phrases,
            "correct": correct,
            "letter": automata.letter.expand(n, -1, -1, -1),
            "next": automata.next.expand(n, -1, -1, -1),
        }
        if references:
            drawn |= reference_accuracies(automata, order, phrases, correct, aligned, ood=self.ood)
        return drawn


def config_of(task: Any) -> dict[str, Any]:
    """Returns the configuration of a task, a dataclass, as JSON gives it back."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(task).items()}


def _check(task: Seq2SeqTask) -> None:
    """Refuses a configuration that cannot be sampled."""
    check_least(task, x_len=1, phrase_len=1, n_examples=0, task_seed=0)
    # `oracle_accuracy` has a bit of an int64 for each letter.
    if task.phrase_len > 60:
        raise ValueError(f"phrase_len is {task.phrase_len}: give at most 60")
    for name in ("alphabet", "letters"):
        if twice := [word for word, count in Counter(getattr(task, name)).items() if count > 1]:
            raise ValueError(f"{name} holds {twice[0]!r} twice: give each character or word once")
    if task.x_len > len(task.alphabet):
        raise ValueError(
            f"x_len is {task.x_len}, but the alphabet has {len(task.alphabet)} symbols and an input holds each of its "
            f"symbols once: give x_len up to {len(task.alphabet)} or a longer alphabet"
        )
    check_choices(task, alignment=AlignmentKind, prior_form=PriorForm, automata=AutomataScope, style=Style)
    if task.prior_form != "text" and task.alignment != "prior":
        raise ValueError(
            f"prior_form is {task.prior_form!r} with alignment={task.alignment!r}: only alignment='prior' has a form"
        )
    if len(task.letters) > 100:
        raise ValueError(f"{len(task.letters)} letters: give at most 100, which is what the tables hold")
    if (task.decay is None) == (task.alignment == "prior"):
        raise ValueError(
            f"decay is {task.decay} with alignment={task.alignment!r}: the alignment prior needs a decay, and only "
            "the prior has one"
        )
    if task.decay is not None and not 0 <= task.decay < math.inf:
        raise ValueError(
            f"decay is {task.decay}: give a finite number from 0 (uniform) up, or alignment='monotonic' for no spread"
        )
    most = {
        "alphabet_range": (len(task.letters), "the letters"),
        "state_range": (100, "what the tables hold"),
        "edge_range": (
            min(task.alphabet_range[0], task.state_range[0]),
            "the fewest letters and states, since edges differ in both",
        ),
    }
    for name, (limit, reason) in most.items():
        low, high = getattr(task, name)
        if not 1 <= low <= high <= limit:
            raise ValueError(
                f"{name} is ({low}, {high}): give (fewest, most) with 1 <= fewest <= most <= {limit} ({reason})"
            )
