"""Counts of documents and tokens: read, kept, and left out, as one line of text."""

from dataclasses import dataclass

LOST_BY = {"truncate": "truncated", "drop": "too long"}  # of --long_rows; "split" loses none


@dataclass
class Count:
    """Documents and tokens read, labels kept, and what was left out.

    Each token that was read is kept, lost in a long document, or lost in a part without a label.
    """

    documents: int = 0
    tokens: int = 0
    labels: int = 0
    long_documents: int = 0
    long_tokens: int = 0
    unlabelled_parts: int = 0
    unlabelled_tokens: int = 0
    malformed: int = 0

    @property
    def kept(self) -> int:
        return self.tokens - self.long_tokens - self.unlabelled_tokens

    def read(self) -> str:
        return f"{self.documents:,} documents of {self.tokens:,} tokens"

    def left_out(self, long_rows: str) -> str:
        """Such as "left out: 30 tokens (3.0%): 20 of 2 truncated documents; 0 malformed rows"."""
        causes = []
        if self.long_documents:
            documents = _number(self.long_documents, f"{LOST_BY[long_rows]} document")
            causes.append(f"{self.long_tokens:,} of {documents}")
        if self.unlabelled_parts:
            parts = _number(self.unlabelled_parts, "part")
            causes.append(f"{self.unlabelled_tokens:,} of {parts} without a label")
        lost = self.tokens - self.kept
        said = "no token"
        if causes:
            said = f"{_number(lost, 'token')} ({lost / self.tokens:.1%}): {', '.join(causes)}"
        return f"left out: {said}; {_number(self.malformed, 'malformed row')}"


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
