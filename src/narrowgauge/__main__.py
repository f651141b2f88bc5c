"""`python -m narrowgauge`: the same as the command `narrowgauge`."""

from narrowgauge.cli.main import main

raise SystemExit(main())
