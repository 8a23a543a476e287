"""The version of this package; apart from the package itself, which stands above all that records it."""

VERSION = "0.1.0"
