"""Translation of short lists whose lexicon a language model knows: only the order is left to be read from examples."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from align_circuits.checks import Tokenizer, check_size, checked
from align_circuits.prompts.prompts import Prompts
from align_circuits.prompts.texts import name_of
from align_circuits.tasks.automaton import Automata
from align_circuits.tasks.corrupt import Corruption
from align_circuits.tasks.gold_relations import prompts_of
from align_circuits.tasks.layout import layout_of, length_of
from align_circuits.tasks.rng import Rng
from align_circuits.tasks.seq2seq import TranslationTask, config_of
from align_circuits.tasks.task import check_choices, check_least
from align_circuits.tasks.token_ids import check_text, check_tokenizer, look_up, token_of
from align_circuits.tasks.word_pairs import LEXICONS

Order = Literal["monotonic", "reversed", "permutation"]
LexiconStyle = Literal["standard", "pre-aligned"]
Unknown = Literal["refuse", "leave out"]


@checked
@dataclass(frozen=True)
class LexiconTask(TranslationTask):
    r"""Translate m words by a lexicon known from pretraining, in an order that k examples show.

    As in `Seq2SeqTask`, output p translates the word at input position Ã(p), and the model must infer which word is
    next: the alignment. Unlike there, it need not read the translations from the examples, unless they all hold the
    words of the test input (`shared`). Every word and every translation is one token; words differ within an input,
    which is a uniformly random order.

    The reference accuracies: `chance` guesses among all translations of the lexicon; `memoryless` knows the words of
    the test input, 1/m; `history` also which of them are still to be translated, 1/(m - p) for output p; `oracle` knows
    lexicon and alignment, 1. What the model loses for want of the lexicon is told by the pre-aligned style, or by
    inputs of one word.

    >>> from align_circuits.models.tokenizer import char_tokenizer
    >>> lexicon = {" A": " a", " B": " b", " C": " c", " D": " d"}
    >>> task = LexiconTask(lexicon, x_len=2, n_examples=1, alignment="reversed", bos=False)
    >>> task.sample(1, char_tokenizer(), seed=0).text
    ['BD:db\nAC:ca']
    """

    target_name: ClassVar = "A translation"

    lexicon: str | Mapping[str, str] = "antonyms"
    """One of `LEXICONS`, or your own: for each word its translation, both as they are written, spaces included."""
    x_len: int = 5
    """m: words in an input, and in an output."""
    n_examples: int = 5
    """k: examples before the test example; without any, nothing shows the order, nor the lexicon."""
    alignment: Order = "monotonic"
    """Ã: `"permutation"` is one drawn for the task (not the identity), the same in all examples."""
    shared: bool = False
    """Whether all examples hold the words of the test input, so that their translations can be looked up. Else none
    does, and the relation `lookup` is absent."""
    style: LexiconStyle = "standard"
    """`"pre-aligned"`: each translation stands behind a copy of its word."""
    unknown: Unknown = "refuse"
    """What happens to pairs with a word that is not one token of the tokenizer."""
    colon: str = ":"
    """Between input and output."""
    separator: str = "\n"
    """Between examples."""
    bos: bool = True
    """Whether prompts start with the tokenizer's BOS token, where it has one."""
    task_seed: int = 0
    """The seed of the permutation."""

    def __post_init__(self):
        check_least(self, x_len=1, n_examples=0, task_seed=0)
        check_choices(self, alignment=Order, style=LexiconStyle, unknown=Unknown)
        if isinstance(self.lexicon, str):
            check_choices(self, lexicon=LEXICONS)

    @checked
    def pairs_of(self, tokenizer: Tokenizer) -> dict[str, str]:
        """Returns the pairs of the lexicon that are drawn from: both words are single tokens of the tokenizer.

        Raises:
            ValueError: A word is not one token, unless such are left out (`unknown`); or too few pairs are left.
        """
        lexicon = dict(LEXICONS[self.lexicon] if isinstance(self.lexicon, str) else self.lexicon)
        broken = [text for pair in lexicon.items() for text in pair if token_of(tokenizer, text) is None]
        read = "; ".join(f"{text!r} is read as {tokenizer.tokenize(text)}" for text in broken[:5])
        told = f"{len(broken)} words of the lexicon are not one token of {name_of(tokenizer)}: {read}"
        if broken and self.unknown == "refuse":
            raise ValueError(f"{told}. Leave their pairs out of the lexicon, or set unknown='leave out'")
        kept = {word: translation for word, translation in lexicon.items() if not {word, translation} & set(broken)}
        # Without sharing, the examples need as many words as the test input, none of them in it.
        needed = self.x_len if self.shared or not self.n_examples else 2 * self.x_len
        if len(kept) < max(needed, 2):
            raise ValueError(
                f"{len(kept)} pairs of the lexicon are single tokens, but inputs of {self.x_len} words need "
                f"{max(needed, 2)}: give a shorter x_len or a longer lexicon, or set shared=True"
                f"{f'. {told}' * bool(broken)}"
            )
        return kept

    @checked
    def sample(self, n: int, tokenizer: Tokenizer | None = None, seed: int = 0, references: bool = True) -> Prompts:
        """Draws prompts whose targets are the translations in the test example.

        Relations are those of `Seq2SeqTask`; `lookup` is absent where the examples do not hold the words (`shared`).
        The first prompts of a seed are the same however many are drawn.

        Arguments as for `Seq2SeqTask.sample`.

        Raises:
            ValueError: There is no tokenizer, it does not read the words as single tokens (`pairs_of`), two of them are
                the same token, or it reads the text as other tokens.
        """
        if n < 1:
            raise ValueError(f"{n} prompts: ask for at least 1")
        m, count = self.x_len, self.n_examples + 1
        length = length_of(self.style, m, 1, self.n_examples, bos=False)
        check_size(n * length, n * m, f"{n:,} prompts of {self.n_examples:,} examples", references=True)
        check_tokenizer(tokenizer)
        lexicon = self.pairs_of(tokenizer)
        ids = look_up(tokenizer, [*lexicon], [*lexicon.values()], self.colon, self.separator, "", spaced=False)
        layout = layout_of(self.style, m, 1, self.n_examples, self.bos and ids.bos is not None)
        check_text(tokenizer, ids, layout)
        words, rng, aligned = len(lexicon), Rng(seed, "lexicon"), list(self.aligned)
        # Each prompt has the lexicon in an order of its own; the words of its test input come first.
        symbols = rng.order("words", n, words)
        order = rng.order("order", n, count, m)
        if not self.shared and self.n_examples:
            order[:, :-1] = m + rng.order("others", n, self.n_examples, words - m)[..., :m]
        translated = symbols.gather(1, order[:, :, aligned].flatten(1)).view(n, count, m, 1)
        correct = torch.nn.functional.one_hot(translated[:, -1], words).bool()
        latent = {
            "symbols": symbols,
            "order": order,
            "phrases": translated,
            "letter": symbols[:, :, None, None],
            "next": torch.zeros_like(symbols)[:, :, None, None],
        }
        left = torch.arange(m, 0, -1, dtype=torch.float64)  # words still to be translated
        known = {"chance": 1 / words, "memoryless": 1 / m, "history": 1 / left, "oracle": 1.0}
        prompts = prompts_of(
            ids,
            layout,
            latent,
            aligned,
            correct=correct,
            references={name: torch.as_tensor(value, dtype=torch.float64).expand(n, m) for name, value in known.items()}
            if references
            else {},
            task={"name": "lexicon", "config": config_of(self), "seed": seed},
        )
        if len(prompts.relations["lookup"]):
            return prompts
        return replace(prompts, relations={name: kept for name, kept in prompts.relations.items() if name != "lookup"})

    @checked
    def corrupt(self, prompts: Prompts, kind: Corruption = "query", *, seed: int = 0) -> Prompts:
        """Returns the corrupted halves of minimal pairs, as `Seq2SeqTask.corrupt` does.

        - `"query"`: the words of the test input change their places, so that each output translates another one.
        - `"labels"`: the translations in the examples are those of other words, one for each word in all of a prompt.
        - `"alignment"`: the outputs of each example are reordered, each example on its own.

        Raises:
            ValueError: As `Seq2SeqTask.corrupt` does.
        """
        return self._corrupted(prompts, kind, seed, True, lambda rng, _: _false_lexicon(rng, prompts.latent["symbols"]))


def _false_lexicon(rng: Rng, symbols: Int[Tensor, "prompt word"]) -> Automata:
    """Automata that write, for each word, the translation of another one: the next in a random cycle of all."""
    # A cycle through all words leaves none at its own translation, as another permutation could.
    cycle = rng.order("cycle", *symbols.shape)
    follower = torch.empty_like(cycle).scatter_(1, cycle, cycle.roll(-1, 1))
    letter = symbols.gather(1, follower)[:, :, None, None]
    return Automata(letter, torch.zeros_like(letter), torch.ones_like(letter[..., 0]))
