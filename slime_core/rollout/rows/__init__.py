"""Prompt data: a row of a JSONL or Parquet file becomes a sample.

`open_prompt_file` opens one file (`prompt_file.py`), `jsonl.py` and `parquet.py` read its rows, `fields.py` and
`images.py` check them, `order.py` shuffles them and `stream.py` runs through them epoch after epoch.
"""

from slime_core.rollout.rows.prompt_file import PromptFile, count_prompts, open_prompt_file, open_prompt_files
from slime_core.rollout.rows.stream import PromptStream

__all__ = ["PromptFile", "PromptStream", "count_prompts", "open_prompt_file", "open_prompt_files"]
