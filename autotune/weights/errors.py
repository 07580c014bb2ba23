"""Errors about weights, one type for each problem, so that callers and tests can distinguish
them.
"""

from autotune.errors import InvalidInput


class BadWeights(InvalidInput):
    """Weights that cannot be used."""


class TruncatedFile(BadWeights):
    """The file ends before its tensors do: an interrupted copy or download."""


class CorruptFile(BadWeights):
    """The header or the index is invalid."""


class HeaderTooLarge(BadWeights):
    """The header claims more bytes than the format allows."""


class MissingWeights(BadWeights):
    """No weights, or not all the files that belong to them."""


class PickledWeights(BadWeights):
    """Only pickled files exist; reading one can run any code, so autotune does not."""


class KeyMismatch(BadWeights):
    """Tensors that the model needs are absent, or it has no slot for some."""


class ShapeMismatch(BadWeights):
    """A tensor has another shape than its slot in the model."""


class DtypeMismatch(BadWeights):
    """An integer tensor for a floating-point slot of the model, or the reverse."""


class HubError(BadWeights):
    """A repository on the hub that cannot be fetched: absent, gated, or out of reach."""
