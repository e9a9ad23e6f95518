"""Masks on a merged batch, against those that each part draws by itself."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from fednorm.core.messages import Batches
from fednorm.core.task import isolated_rng
from fednorm.engines.merged_batch import UnmatchedDrawError, share_masks

SEEDS = (5, 2**40, 5)
# One sample alone does not show whether its channels come last.
SIZES = {torch.contiguous_format: (4, 1, 7), torch.channels_last: (4, 2, 6)}


class Functional(nn.Module):
    def forward(self, x):
        return functional.dropout(functional.dropout2d(x, 0.3, self.training), 0.5, self.training)


class Folded(nn.Module):
    """Makes samples of the second axis and drops there."""

    def forward(self, x):
        return functional.dropout(x.flatten(0, 1), 0.4).view(x.shape)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)

    def forward(self, x):
        x = x.flatten(2).transpose(1, 2)
        return self.attention(x, x, x, need_weights=False)[0]


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x) * torch.empty(len(x), 1, 1, 1).bernoulli_(0.5)


DRAWING = {
    "dropout": nn.Sequential(nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.3)),
    "inplace": nn.Sequential(nn.Conv2d(4, 4, 1), nn.Dropout(0.5, inplace=True)),
    "whole channels": nn.Dropout2d(0.5),
    "alpha": nn.Sequential(nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.3)),
    "random slopes": nn.RReLU(),
    "functional": Functional(),
    "folded": Folded(),
    "attention": Attention(),
    "noise": Noise(),
}


def parts_of(dtype, layout):
    generator = torch.Generator().manual_seed(0)
    made = []
    for client, (size, seed) in enumerate(zip(SIZES[layout], SEEDS, strict=True)):
        x = torch.randn(size, 4, 3, 3, generator=generator, dtype=dtype)
        x = x.to(memory_format=layout)
        made.append(Batches(client, [(x, torch.zeros(size, dtype=torch.int64))], size, seed=seed))
    return made


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", DRAWING)
def test_each_part_of_a_merged_batch_gets_its_own_draws(name, dtype, layout):
    anchor = nn.Linear(1, 1)  # a model has parameters, from which its device is known
    model = nn.ModuleList([DRAWING[name], anchor]).to(dtype).train()
    parts = parts_of(dtype, layout)
    expected = []
    for part in parts:
        with isolated_rng(part.seed, model):
            ((x, _),) = part.steps
            expected.append(model[0](x))
    merged = torch.cat([x for part in parts for x, _ in part.steps])
    merged = merged.contiguous(memory_format=layout)
    before = torch.get_rng_state()
    with share_masks(parts, model):
        found = model[0](merged)
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(found, torch.cat(expected))
    with isolated_rng(parts[0].seed, model):  # what one machine would draw by itself
        assert not torch.allclose(model[0](merged), torch.cat(expected))


def draw_for_no_sample(x):
    return x * torch.rand(())


def draw_for_the_batch(x):
    return x * torch.empty(1, 4, 1, 1).bernoulli_(0.5)


@pytest.mark.parametrize("draw", [draw_for_no_sample, draw_for_the_batch])
def test_draws_that_belong_to_no_sample_are_refused(draw):
    parts = parts_of(torch.float32, torch.contiguous_format)
    x = torch.cat([x for part in parts for x, _ in part.steps])
    with (
        pytest.raises(UnmatchedDrawError, match=r"for each sample, .* batch of 12 samples"),
        share_masks(parts, nn.Linear(1, 1)),
    ):
        draw(x)


def test_a_generator_of_the_models_own_is_left_to_it():
    parts = parts_of(torch.float32, torch.contiguous_format)
    with share_masks(parts, nn.Linear(1, 1)):
        found = torch.rand(3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(found, torch.rand(3, generator=torch.Generator().manual_seed(1)))
