"""Stands in for torchvision, whose builds need a matching build of torch.

SGLang and transformers import it for image processors, which no test uses.
"""

from torchvision.placeholders import placeholder as __getattr__  # noqa: F401

__version__ = "0"
