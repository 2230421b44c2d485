"""Prompts: tokens, the targets to predict, and the relations that say which positions should attend to which.

Token ids, or what a task drew, come in; `Prompts` with their `Relation`s go out, and every other room reads them.
"""

from align_circuits.prompts.prompts import Prompts, TokenKind
from align_circuits.prompts.relations import Relation

__all__ = ["Prompts", "Relation", "TokenKind"]
