"""``python -m attngen``: the command line."""

from attngen.cli import main

main()
