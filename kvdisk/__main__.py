"""``python -m kvdisk``: the same as the ``kvdisk`` command, for when that is not on the PATH."""

from kvdisk.cli import main

if __name__ == "__main__":
    main(prog_name="kvdisk")
