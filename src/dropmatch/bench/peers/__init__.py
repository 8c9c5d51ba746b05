"""Other people's speculative decoding beside ours: an environment for their packages, a process for each, one run.

`environment` installs them apart from everything else, `child` is what runs there, `process` speaks with it, and `race`
times all on the same prompts.
"""
