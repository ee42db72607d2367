"""The version. Apart, so that what the package exports can name it."""

__version__ = "0.1.0"
