from torchvision.placeholders import placeholder as __getattr__  # noqa: F401
