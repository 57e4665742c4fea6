import sys

from unisono.cli import main

sys.exit(main())
