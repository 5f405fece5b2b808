"""`python -m cairn COMMAND ...`: the command `cairn`, for where no scripts are installed."""

import sys

from cairn.launch.main import main

if __name__ == "__main__":
    sys.exit(main())
