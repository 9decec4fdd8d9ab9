"""Run block.py of each folder as a process of its own would, where only its files are found.

    python tests/scripts/run_blocks.py FOLDER...      one with a folder models/ finds the project
"""

import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_block(folder):
    """Run a block, and forget the modules of its folder and of the project."""
    places = [str(folder)]
    if (folder / "models").exists():
        places.append(str(ROOT))
    os.chdir(folder)
    sys.path[:0] = places
    runpy.run_path("block.py")
    del sys.path[:len(places)]
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        is_found = path.startswith(tuple(f"{place}/" for place in places))
        is_found |= name in ("data", "support")  # without __init__.py they have no file
        if is_found and name != "__main__":
            del sys.modules[name]


if __name__ == "__main__":
    del sys.path[0]  # tests/scripts
    for argument in sys.argv[1:]:
        run_block(Path(argument))
