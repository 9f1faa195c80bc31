"""verl's trainer on CPUs with a model of a few thousand weights, through verl's own extension points.

`verl.trainer.main_ppo.TaskRunnerV1` runs unchanged, with its asynchronous replay buffer, agent loop workers, training
workers, reward workers and the servers' load balancer, each a Ray actor. The parts that need a GPU have stand-ins
(`platform`), and so have the model engine (`engine`), the inference engine (`rollout`), prompts and rewards
(`prompts`), the agent (`agent_loop`) and the image processor (`images`). All of them are deterministic. `rounds` makes
the run deterministic too: it decides what verl leaves to races.
"""
