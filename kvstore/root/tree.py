"""Deletes a folder with all its content, for scratch folders of our own. Nothing else is ever deleted that way."""

from __future__ import annotations

from kvstore.format.places import Name
from kvstore.root.interface import Root

DEPTH_MAX = 4


def remove_tree(root: Root, folder: Name, depth_max: int = DEPTH_MAX) -> bool:
    """Deletes a folder, whose folders may be ``depth_max`` deep; False if something was left.

    Raises the root's errors. Follows no links: a link to a folder elsewhere is a file here.
    """
    if depth_max < 0:
        return False
    for entry in list(root.list(folder)):
        name = Name(f"{folder}/{entry.name}")
        if entry.stat is None:
            remove_tree(root, name, depth_max - 1)
        else:
            root.remove(name)
    return root.remove_folder(folder)
