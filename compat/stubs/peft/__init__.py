"""A stand-in: see README.md."""

__version__ = "0"

LoraConfig = PeftModel = PeftType = TaskType = get_peft_model = None
