"""`python -m deployments.cli` is `raydix`."""

from deployments.cli.app import main

main()
