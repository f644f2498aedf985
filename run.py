"""Run an arm, or a sweep of arms: ``python run.py arm=elastic headroom=512MiB``. ``--help`` lists what can be set."""

from __future__ import annotations

import sys

from runner.cli.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
