"""Different language models learn together: GRPO on everybody's completions, corrected by F-TIS."""
