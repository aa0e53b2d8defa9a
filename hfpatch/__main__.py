from hfpatch.cli.main import main

raise SystemExit(main())
