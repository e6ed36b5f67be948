"""GuideLLM's command line, with the PyTorch of Raydix's environment, as its own would take minutes to install.

python guidellm_program.py SITE_PACKAGES run ...
"""

import sys

sys.path.append(sys.argv.pop(1))  # last, so that all else comes from this environment

if __name__ == "__main__":
    from guidellm.__main__ import cli

    cli()
