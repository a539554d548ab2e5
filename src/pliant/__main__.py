from pliant.cli import main

raise SystemExit(main())
