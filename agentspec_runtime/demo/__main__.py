"""`python -m agentspec_runtime.demo`."""

import sys

from agentspec_runtime.demo import main

sys.exit(main())
