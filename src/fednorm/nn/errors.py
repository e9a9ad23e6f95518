"""What goes wrong when a model is converted."""


class ConversionError(TypeError):
    """A layer that cannot be converted; the message names it."""
