"""Text classification: token ids, an embedding, and BatchNorm1d after it.

Six clients write about two topics each. Run it with `python examples/text_classification.py`.
"""

import torch
from torch import nn

import fednorm

TOPICS, WORDS, LENGTH, EACH = 6, 200, 16, 80


class BagOfWords(nn.Module):
    """The mean of a text's word vectors, normalized, and a linear classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, 32)
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, TOPICS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a score per topic; ids are int64, [texts, words]."""
        return self.head(self.norm(self.words(ids)).relu())


def write_texts(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw texts as token ids: half of the words are those of the topic."""
    generator = torch.Generator().manual_seed(seed)
    topics = torch.arange(TOPICS).repeat_interleave(EACH)
    shape = (len(topics), LENGTH)
    own = topics[:, None] * 20 + torch.randint(0, 20, shape, generator=generator)
    common = torch.randint(20 * TOPICS, WORDS, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 1 / 2, own, common), topics


if __name__ == "__main__":
    result = fednorm.compare(
        ["centralized", "naive", "fbn", "gn"],
        data=(*write_texts(seed=0), *write_texts(seed=1)),
        model=BagOfWords,
        partition="shards=0.34",
        clients=6,
        algorithm={"name": "dsgd", "lr": 1.0},
        rounds=60,
        seeds=1,
    )
    for run in result.runs:
        print(f"{run.strategy:12} {run.metric} {run.final.accuracy:.1%}")
