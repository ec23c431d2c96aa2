"""Train networks: ``python -m benchmarks.learning --help``."""

from .command import main

raise SystemExit(main())
