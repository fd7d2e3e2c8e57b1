"""Stores written as Minari datasets."""

import shutil
import warnings
from collections.abc import Iterator
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from decisionllm.datasets.action_spaces import ActionSpace, decode_actions
from decisionllm.datasets.categorical import original_space
from decisionllm.datasets.space_parts import AnySpace, replace_texts
from decisionllm.datasets.spaces import unflatten
from decisionllm.datasets.store import Store
from decisionllm.files import explain_errors
from decisionllm.schema import Json

if TYPE_CHECKING:
    from gymnasium import Env
    from gymnasium.envs.registration import EnvSpec
    from minari import MinariDataset
    from minari.data_collector import EpisodeBuffer


def export_store(
    minari_id: str,
    store: Store,
    *,
    env: "Env[Any, Any] | EnvSpec | str | None" = None,
    reference: tuple[float, float] | None = None,
    final: np.ndarray | None = None,
    observation_space: AnySpace | None = None,
    action_space: ActionSpace | None = None,
) -> "MinariDataset":
    """Write a store as a local Minari dataset, all or nothing; groups and action masks are left out,
    and texts unless a part of the observation space is one.

    Minari stores one more observation than actions: an episode without a final observation repeats
        its last one.

    Args:
        minari_id: with a version, such as mine/maze-v0.
        store: the data.
        env: an environment or its spec, for `recover_environment`.
        reference: returns of a random policy and of an expert; Minari drops them where no
            environment is given, so that they are written afterwards.
        final: (E, S) final observations, of a store without them.
        observation_space: of the environment, into whose values rows are laid out by
            `spaces.unflatten`; a categorical part is written as the Box that it was; None: a Box of
            S numbers.
        action_space: of the environment; None: that of the spec.

    Returns:
        The open Minari dataset.

    Raises:
        FileExistsError: such a dataset is there already.
        ValueError: the id has no version.
    """
    import minari
    from minari.storage import get_dataset_path

    check_new(minari_id)
    if not observation_space:
        shape = (store.spec.observation_dim,)
        observation_space = spaces.Box(-np.inf, np.inf, shape, np.float32)
    observation_space = replace_texts(observation_space, store.tasks)
    written_space = original_space(observation_space)
    action_space = action_space or _infer_action_space(store, named=env is not None)
    finals = store.final_observation if final is None else final
    # By default Minari writes images as JPEG, which changes their numbers; 0.5.3 has no such option
    parameters = signature(minari.create_dataset_from_buffers).parameters
    lossless: Json = {"jpeg_encoding": False} if "jpeg_encoding" in parameters else {}
    description = f"{store.info['name']}, written by decisionllm, fingerprint {store.fingerprint}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about the missing author and links
            dataset = minari.create_dataset_from_buffers(
                minari_id,
                _build_buffers(store, finals, observation_space, action_space),
                env=env,
                observation_space=written_space,
                action_space=action_space,
                data_format="hdf5",
                description=description,
                **lossless,
            )
        if reference is not None:
            low, high = reference
            dataset.storage.update_metadata({"ref_min_score": low, "ref_max_score": high})
    except BaseException:
        shutil.rmtree(get_dataset_path(minari_id), ignore_errors=True)
        raise
    return dataset


def check_new(minari_id: str) -> None:
    """Raise an error unless a Minari dataset of this id can be written."""
    from minari.dataset.minari_dataset import parse_dataset_id
    from minari.storage import get_dataset_path

    expected = "an id with a version, such as mine/maze-v0"
    with explain_errors(
        f"export=minari: expected {expected}, got {minari_id!r}", ValueError, TypeError
    ):
        parse_dataset_id(minari_id)
    if get_dataset_path(minari_id).exists():
        raise FileExistsError(
            f"{minari_id}: such a Minari dataset is there already; choose another name or version"
        )


def _build_buffers(
    store: Store,
    finals: np.ndarray | None,
    observation_space: AnySpace,
    action_space: ActionSpace,
) -> Iterator["EpisodeBuffer"]:
    """Yield the episodes of a store as Minari writes them. finals: (E, S) final observations."""
    from minari.data_collector import EpisodeBuffer

    is_own = finals is store.final_observation
    has_final = store.has_final if is_own else np.ones(len(store.lengths), bool)
    for e in range(len(store.lengths)):
        episode = store.episode(e)
        last = episode.observations[-1] if finals is None or not has_final[e] else finals[e]
        rows = np.concatenate([episode.observations, last[None]])
        ends = np.zeros((2, len(episode.rewards)), bool)
        ends[:, -1] = episode.terminated, episode.truncated
        yield EpisodeBuffer(
            id=e,
            observations=unflatten(rows, observation_space, text=episode.task),
            actions=decode_actions(episode.actions, action_space),
            rewards=episode.rewards,
            terminations=ends[0],
            truncations=ends[1],
        )


def _infer_action_space(store: Store, *, named: bool) -> ActionSpace:
    """Return the action space of a store's spec.

    Args:
        store: the data.
        named: an environment of this package is named, which takes the index of a combination as it
            is.
    """
    spec = store.spec
    if not spec.num_actions:
        return spaces.Box(*np.array([spec.low, spec.high], np.float32))
    sizes = store.info.get("action_parts")
    if named or not sizes:
        return spaces.Discrete(spec.num_actions)
    return spaces.MultiDiscrete(sizes)
