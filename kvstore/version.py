"""The version of this package, in a module of its own: modules below the package record it."""

VERSION = "0.1.0"
