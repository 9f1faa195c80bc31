"""verl's trainer on CPUs with a model of a few thousand weights, through the places that verl has for such.

`verl.trainer.main_ppo.TaskRunnerV1` runs as it is, and with it its asynchronous replay buffer, its agent loop workers,
its training workers, its reward workers and its servers' load balancer, each a Ray actor. Stood in for are what needs a
GPU (`platform`), the model engine (`engine`), the inference engine (`rollout`), prompts and rewards (`prompts`), the
agent (`agent_loop`) and the processor of images (`images`). All of them are deterministic, and `rounds` sees to it that
the run is: what verl leaves to a race is decided there.
"""
