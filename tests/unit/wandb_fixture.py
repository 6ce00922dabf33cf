"""A W&B run of the interface that `entmtp.from_logs` reads, without W&B."""

from dataclasses import dataclass, field

from entmtp.tracking import BATCH


@dataclass
class Fake:
    """To choose among and to refuse."""

    name: str = "sharegpt"
    job: str = "task"
    created: float = 0.0
    batch: str = "a"
    finished: bool = True
    group: str = "smoke"
    where: str = "here"
    id: str = ""
    files_: dict = field(default_factory=dict)
    steps: list = field(default_factory=list)
    policies: tuple = ("ar",)

    @property
    def config(self) -> dict:
        return {BATCH: self.batch, "tasks": ["sharegpt"], "policies": list(self.policies)}

    def history(self):
        return iter(self.steps)

    def files(self):
        return sorted(self.files_)

    def read(self, name):
        return self.files_[name]
