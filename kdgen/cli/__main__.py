"""`python -m kdgen.cli`: the same as the `kdgen` command."""

from kdgen.cli import main

main()
