"""What the fork server of the rank processes imports once."""

import torch

torch.set_num_threads(1)

from rl_actors.trainer import cpu  # noqa: E402

cpu.install()

import rl_actors.trainer.lora  # noqa: E402
import rl_actors.trainer.peft_adapter  # noqa: E402
import rl_actors.trainer.update  # noqa: E402, F401
