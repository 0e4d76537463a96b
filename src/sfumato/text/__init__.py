"""Text as rows for the door: vocabularies counted in public text only, sequences and documents as privacy units."""

from sfumato.text.byte_pairs import BytePairs
from sfumato.text.cutting import IGNORED, by_document, by_line, by_stream, next_words
from sfumato.text.door import private_text, stamp
from sfumato.text.measures import next_word, word_loss
from sfumato.text.vocabulary import END, UNKNOWN, PublicText, Vocabulary
from sfumato.text.wikitext import WikiText, wikitext2

__all__ = [
    "END",
    "IGNORED",
    "UNKNOWN",
    "BytePairs",
    "PublicText",
    "Vocabulary",
    "WikiText",
    "by_document",
    "by_line",
    "by_stream",
    "next_word",
    "next_words",
    "private_text",
    "stamp",
    "wikitext2",
    "word_loss",
]
