"""How models write reasoning and tool calls: in prompts, in answers, as a grammar."""
