"""Normalization by the sample's own moments: GroupNorm, LayerNorm and InstanceNorm in one layer."""

from torch import Tensor, nn


class SampleNorm(nn.GroupNorm):
    """GroupNorm that refuses to normalise a single value, which would erase its input.

    One group is LayerNorm over all of a sample; as many groups as channels is InstanceNorm.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        """Normalise each group of channels of each sample."""
        values = input[0].numel() // self.num_groups
        if values <= 1:
            raise ValueError(
                f"{self.num_groups} groups on input of shape {tuple(input.shape)} leave one value "
                "per group, and normalising a single value always gives 0; "
                "use fewer groups (strategy 'gn' or 'ln')."
            )
        return super().forward(input)
