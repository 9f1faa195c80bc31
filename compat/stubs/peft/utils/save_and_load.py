"""A stand-in: see README.md."""

get_peft_model_state_dict = None
