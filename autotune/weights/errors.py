"""What can be wrong with weights, one type each, so that callers and tests can tell them apart.

InvalidInput
└── BadWeights
    ├── TruncatedFile, CorruptFile, HeaderTooLarge     a file that cannot be read
    ├── MissingWeights, PickledWeights                 a folder without weights that can be read
    ├── KeyMismatch, ShapeMismatch, DtypeMismatch      sound files for another model
    └── HubError                                       a repository that cannot be fetched
"""

from autotune.errors import InvalidInput


class BadWeights(InvalidInput):
    """Weights that cannot be used."""


class TruncatedFile(BadWeights):
    """The file ends before its tensors do: an interrupted copy or download."""


class CorruptFile(BadWeights):
    """The header or the index says something that cannot be true."""


class HeaderTooLarge(BadWeights):
    """The header claims more bytes than the format allows."""


class MissingWeights(BadWeights):
    """No weights, or not all the files that belong to them."""


class PickledWeights(BadWeights):
    """Only pickled files are there; reading one can run any code, so autotune does not."""


class KeyMismatch(BadWeights):
    """Tensors that the model needs are absent, or it has no place for some."""


class ShapeMismatch(BadWeights):
    """A tensor has another shape than its place in the model."""


class DtypeMismatch(BadWeights):
    """A tensor of whole numbers where the model has real numbers, or the reverse."""


class HubError(BadWeights):
    """A repository on the hub that cannot be fetched: absent, gated, or out of reach."""
