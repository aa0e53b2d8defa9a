from hfpatch.commands.main import main

raise SystemExit(main())
