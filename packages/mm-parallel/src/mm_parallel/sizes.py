"""How many ranks each parallel dimension gets; pure arithmetic, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from mm_parallel.config import ParallelConfig
from mm_parallel.errors import FieldError, FieldPath


@dataclass(frozen=True)
class MeshSizes:
    """World size, factored twice: ``replicate × shard`` (parameters), ``data × ring × ulysses`` (batch).

    Args:
        replicate: copies of the parameters.
        shard: ranks that share one copy.
        ulysses: ranks that exchange heads for tokens; neighbours in rank order.
        ring: ranks around which keys and values rotate; outside ulysses.
    """

    replicate: int = 1
    shard: int = 1
    ulysses: int = 1
    ring: int = 1

    def __post_init__(self) -> None:
        if self.world % self.context:
            raise ValueError(
                f"replicate × shard = {self.replicate} × {self.shard} = {self.world} ranks can't be divided "
                f"into groups of ulysses × ring = {self.ulysses} × {self.ring} = {self.context} ranks"
            )

    @property
    def world(self) -> int:
        """All ranks."""
        return self.replicate * self.shard

    @property
    def context(self) -> int:
        """Ranks that share one sample."""
        return self.ulysses * self.ring

    @property
    def data(self) -> int:
        """Groups of ranks that each see a sample of their own."""
        return self.world // self.context

    @classmethod
    def resolve(cls, config: ParallelConfig, world_size: int) -> MeshSizes:
        """Settle every ``auto`` for ``world_size`` ranks.

        Raises:
            FieldError: sizes that don't divide, with the field and the numbers.
        """
        ulysses, ring = config.ulysses_parallel_size, config.ring_attention_size
        context = ulysses * ring
        if world_size % context:
            raise _size_error(
                "ulysses_parallel_size",
                message=f"ulysses_parallel_size × ring_attention_size = {ulysses} × {ring} = {context} doesn't divide "
                f"the {world_size} ranks",
            )
        data = world_size // context
        if config.data_parallel_size not in (None, data):
            raise _size_error(
                "data_parallel_size",
                message=f"{config.data_parallel_size} was given, but {world_size} ranks / (ulysses {ulysses} × ring "
                f"{ring}) = {data}; leave it out or correct it",
            )
        requested = config.fully_shard_parallel_size
        shard = world_size if requested == "auto" else requested
        if world_size % shard:
            raise _size_error(
                "fully_shard_parallel_size",
                message=f"{shard} doesn't divide the {world_size} ranks (allowed: {_divisors(world_size)})",
            )
        sizes = cls(replicate=world_size // shard, shard=shard, ulysses=ulysses, ring=ring)
        sizes._check_plan(config)
        return sizes

    def check_sequence_split(self, path: FieldPath, shard_size: int) -> None:
        """Refuse a shard size that cuts through context-parallel groups (for a sub-model with split tokens).

        Args:
            path: field of the ``parallel`` section that the size comes from.

        Raises:
            FieldError: naming the field and the numbers.
        """
        if shard_size % self.context:
            raise _size_error(
                *path,
                message=f"{shard_size} ranks share one copy of the parameters, but where the sequence "
                f"is split that must be a multiple of ulysses × ring = {self.ulysses} × {self.ring} = "
                f"{self.context}",
            )

    def _check_plan(self, config: ParallelConfig) -> None:
        plan = config.fsdp_plan
        _check_reshard_size(("fsdp_plan",), plan.reshard_after_forward, self.shard)
        trained = False
        for name, sub in plan.sub_plans.items():
            where: FieldPath = ("fsdp_plan", "sub_plans", name)
            shard = sub.shard_size or self.shard
            if self.world % shard:
                allowed = f"(allowed: {_divisors(self.world)})"
                raise _size_error(
                    *where, "shard_size", message=f"{shard} doesn't divide the {self.world} ranks {allowed}"
                )
            _check_reshard_size(where, plan.reshard_for(name), shard)
            if sub.trainable:
                trained = True
                self.check_sequence_split((*where, "shard_size"), shard)
        if not trained:
            self.check_sequence_split(("fully_shard_parallel_size",), self.shard)


def _size_error(*path: str | int, message: str) -> FieldError:
    return FieldError(".".join(["parallel", *map(str, path)]), message, path=path)


def _check_reshard_size(plan: FieldPath, reshard: bool | int, shard: int) -> None:
    if isinstance(reshard, bool):
        return
    if shard % reshard or reshard == shard:
        allowed = ", ".join(str(d) for d in range(2, shard) if shard % d == 0) or "none"
        raise _size_error(
            *plan,
            "reshard_after_forward",
            message=f"{reshard} must divide the {shard} ranks that share a copy, and be below {shard} "
            f"(allowed: true, false, or {allowed})",
        )


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


def check_heads(heads: int, ulysses: int) -> None:
    """Refuse a Ulysses degree that doesn't divide the attention heads.

    Raises:
        FieldError: the message lists the degrees that do.
    """
    if heads % ulysses:
        raise _size_error(
            "ulysses_parallel_size",
            message=f"{ulysses} doesn't divide the {heads} attention heads (allowed: {_divisors(heads)}); "
            "ring_attention_size has no such limit",
        )
