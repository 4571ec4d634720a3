"""Clients' own models as files: a plain state_dict, a graph of torch.export or ONNX; and built again from these."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from inspect import isclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from pfl_lightning.checks import check_choice
from pfl_lightning.client import FederatedClient
from pfl_lightning.data import FederatedData, client_number, label_map_of, names_of
from pfl_lightning.encoders import build_encoder
from pfl_lightning.encoders.assignment import unwrapped
from pfl_lightning.encoders.registry import find_encoder
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.federation.own_models import check_is_set_up
from pfl_lightning.names import method_named
from pfl_lightning.notices import named_clients
from pfl_lightning.seeding import torch_seed
from pfl_lightning.state.equality import same
from pfl_lightning.state.files import replace_file

if TYPE_CHECKING:
    from pfl_lightning.federation.federation import Federation


FORMATS = {"state_dict": ".pt", "torch_export": ".pt2", "onnx": ".onnx"}
"""Formats of exported models, and how their files end."""

TOLERANCE = 1e-4
"""How far class scores of an exported graph may be from the model's, beside as large a share of them."""

BATCH = 64
"""Samples of a client on which an exported model is compared with the client's own."""


def exported_clients(federation: Federation, clients: Iterable[int | str] | None) -> Iterator[tuple[int, str]]:
    """Clients that are exported, and the name of each one's file or folder, such as ``client_03``.

    Args:
        federation: A federation that has been fitted, or has loaded a checkpoint.
        clients: Numbers or names of clients; ``None`` for all.

    Raises:
        FederationError: The federation has not been fitted or evaluated yet.
        NoSuchClientError: There is no such client.
    """
    check_is_set_up(federation)
    width = len(str(federation.num_clients - 1))
    for client in range(federation.num_clients) if clients is None else clients:
        number = client_number(federation.data, client)
        yield number, f"client_{number:0{width}d}"


def export_clients(
    federation: Federation,
    folder: str | Path,
    clients: Iterable[int | str] | None = None,
    format: Literal["state_dict", "torch_export", "onnx"] = "state_dict",
) -> list[Path]:
    """Write every client's model, by default as a plain state_dict, with a description next to it.

    A client's model is the one it is evaluated with, fine-tuned if the method does so before an evaluation, and
    personalized inside of ``federation.personalized(...)``. It is written to ``client_<number>.pt``, which
    ``torch.load(path, weights_only=True)`` reads. ``client_<number>.json`` has what the model can be built from
    (:func:`load_exported`), and what else must be known to use it: the page on export describes each entry. In a
    federation of a user-defined LightningModule the names are those of the module, so that its ``load_state_dict``
    takes them. Otherwise they are ``encoder.*``, ``head.*`` and those of further modules that the method predicts with.

    The other formats hold the whole computation from normalized inputs to class scores, of any number of samples. Each
    file is read again and compared with the model, on a batch of the client's data and on one sample of it.

    Args:
        federation: A federation that has been fitted, or has loaded a checkpoint.
        folder: Folder of the files; made if it does not exist.
        clients: Numbers or names of clients; ``None`` for all.
        format: ``"state_dict"`` (``.pt``), ``"torch_export"`` (``.pt2``, of :func:`torch.export.save`) or ``"onnx"``
            (``.onnx``; needs the extra ``onnx``).

    Returns:
        Paths of the files with the models.

    Raises:
        ConfigurationError: The model has no such format, or the file predicts otherwise; it names the client.
        FederationError: The federation has not been fitted or evaluated yet.
        NoSuchClientError: There is no such client.
    """
    check_choice("format", format, tuple(FORMATS))
    target, written = Path(folder), []
    for client, name in exported_clients(federation, clients):
        model: Any = federation.client_model(client)
        own = model if isinstance(model, FederatedClient) else federation.clients.model_of(client)
        has_head = not own.uses_knn_evaluation()
        path = target / f"{name}{FORMATS[format]}"
        with nullcontext() if format == "state_dict" else warnings.catch_warnings(action="ignore"):
            names = own.exported_names()  # which warns of what a state_dict leaves out
        named = *model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)
        state = {**model.state_dict(), **dict(named)}  # a module's author may let its state_dict leave some out
        state = {name: state[name].detach().cpu().clone() for name in names}
        about = {
            "method": federation.method_name,
            "round": federation.round + 1 if federation.has_trained else 0,
            "client": client,
            "model": own.exported_label or federation.clients.labels[federation.clients.architecture_of[client]],
            **_about_data(federation.data, client, model is own, has_head),
            **_recipe(federation, client, model, state),
        }
        with replace_file(path) as temporary, temporary.open("wb") as file:
            if format != "state_dict":
                _write_graph(federation, client, model, names, format, temporary)
            else:
                if not has_head:
                    warnings.warn(
                        f"{federation.method_name} trains no head: head.* in the exported models has its initial "
                        "values, only encoder.* was trained; export personalized clients for models that predict "
                        "(--personalize)",
                        stacklevel=2,
                    )
                torch.save(state, file)
        with replace_file(path.with_suffix(".json")) as temporary:
            temporary.write_text(json.dumps(about, indent=2) + "\n")
        written.append(path)
    return written


def class_names(data: FederatedData, client: int) -> list[str] | None:
    """Names of the classes in the order of a client's outputs; ``None`` where they are not known."""
    names = getattr(data, "class_names", None) if data.num_classes else None
    if names is not None and (numbers := label_map_of(data, client)) is not None:  # outputs in an order of their own
        own = dict(zip(numbers, names, strict=True))
        names = [own[number] for number in sorted(own)]
    return None if names is None else list(names)


def _about_data(data: FederatedData, client: int, has_shape: bool, has_head: bool) -> dict[str, Any]:
    """The client's name, inputs and outputs: who loads the file elsewhere has no data module."""
    transform = getattr(data, "transform", None)  # a user-defined data module may have none
    mean, std = (getattr(transform, name, None) for name in ("mean", "std"))
    names, shape = names_of(data), data.input_shape if has_shape else None
    return {
        "name": names[client] if names else None,
        "input_shape": None if shape is None else list(shape),
        "image_size": list(shape[1:]) if shape is not None and len(shape) == 3 else None,
        "mean": None if mean is None else list(mean),
        "std": None if std is None else list(std),
        "classes": class_names(data, client) if has_head else None,
        "table": getattr(data, "input_encoding", None),
    }


# ---------------------------------------------------------------------- a model built from its description


def _recipe(federation: Federation, client: int, model: Any, state: Mapping[str, Tensor]) -> dict[str, Any]:
    """What builds the model again, as a config says it; ``None`` with the reason where that gives another one."""
    try:
        if not isinstance(model, FederatedClient):
            raise ConfigurationError(f"it is your own {type(model).__name__}: make one and load the state_dict")
        if model.uses_knn_evaluation():
            raise ConfigurationError(f"{federation.method_name} trains no head: export personalized clients")
        own, given = unwrapped(federation.method_factory)
        place = federation.clients.architecture_of[client]
        made: Any = given.get("partner") if model.exported_label else federation._assignment.encoders[place]
        if isinstance(made, nn.Module):
            raise ConfigurationError("its encoder was given as a module: load the state_dict into one like it")
        encoder, options = unwrapped(made)
        if isinstance(encoder, str):
            encoder, options = find_encoder(encoder)
        recipe = {
            "encoder": _named(encoder, {**options, "weights": None} if "weights" in options else options),
            "method": _named(type(model), given if type(model) is own else {}),
            "num_classes": model.num_classes,
        }
        with warnings.catch_warnings(action="ignore"):  # its first making has said them
            rebuilt = _built(recipe, federation.data.input_shape, state)
        inputs = _batch_of(federation, client)
        with torch.no_grad():
            if not same(rebuilt(inputs), model.cpu().eval()(inputs), nan=True):
                raise ConfigurationError(
                    f"{type(model).__name__} predicts with more than the state_dict holds, or was made by a function "
                    "of your own: the formats torch_export and onnx hold the whole prediction"
                )
    except Exception as error:  # whatever a user's encoder does
        return {"recipe": None, "no_recipe": " ".join(str(error).split())}
    return {"recipe": recipe, "no_recipe": None}


def _named(made: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """A class and those of its arguments that a file can hold: neither optimizers nor networks."""
    plain = {}
    for name, value in given.items():
        try:
            plain[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            continue
    return {"class_path": f"{made.__module__}.{made.__qualname__}", "init_args": plain}


def _built(recipe: Mapping[str, Any], input_shape: Iterable[int], state: Mapping[str, Tensor]) -> FederatedClient:
    encoder, method = recipe["encoder"], recipe["method"]
    make = method_named(method["class_path"])
    if not isclass(make) or not issubclass(make, FederatedClient):  # nothing else is called
        raise ConfigurationError(f"{method['class_path']} is not the client of a method")
    with torch_seed(0):  # the caller's draws stay as they are
        network = build_encoder(encoder["class_path"], tuple(input_shape), **encoder["init_args"])
        model = make(network, recipe["num_classes"], **method["init_args"])
    missing, unknown = model.load_state_dict(state, strict=False, assign=True)
    lacking = {*unknown, *({*missing} & {*model.exported_names()} if missing else ())}
    if lacking:
        raise ConfigurationError(f"state_dict and description differ in {', '.join(sorted(lacking))}")
    return model.eval()


def load_exported(path: str | Path) -> FederatedClient:
    """Build a client's model from the files that :func:`export_clients` has written as a state_dict.

    The description names classes, which are imported and called: load only files that you trust.

    Example:
        >>> model = load_exported("models/client_3.pt")  # doctest: +SKIP
        >>> model(inputs).softmax(1)  # of normalized inputs (N, C, H, W)  # doctest: +SKIP

    Args:
        path: ``client_<number>.pt``, with ``client_<number>.json`` beside it.

    Returns:
        The model, in evaluation mode on the CPU: from normalized inputs to class scores (N, C).

    Raises:
        ConfigurationError: The description does not say how to build the model, or the two files do not fit.
    """
    file, about = Path(path).with_suffix(".pt"), description(path)
    if about.get("recipe") is None:
        why = about.get("no_recipe", "it was exported by an earlier version: export it again")
        raise ConfigurationError(f"{file}: client {about.get('client')}'s model cannot be built from the files: {why}")
    try:
        return _built(about["recipe"], about["input_shape"], torch.load(file, map_location="cpu", weights_only=True))
    except (LookupError, TypeError, ValueError, RuntimeError, OSError, EOFError, UnpicklingError) as error:
        raise ConfigurationError(
            f"{file}: client {about['client']}'s model cannot be built from the files: {' '.join(str(error).split())}; "
            "both must be from one export, and your own classes importable"
        ) from error


def description(path: str | Path) -> dict[str, Any]:
    """What the JSON beside an exported model says.

    Raises:
        ConfigurationError: It cannot be read.
    """
    described = Path(path).with_suffix(".json")
    try:
        about: dict[str, Any] = json.loads(described.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{described}, which pfl export writes next to a model, cannot be read: {error}; export the client again"
        ) from error
    return about


def exported_inputs(path: str | Path, inputs: Any) -> Tensor:
    """Inputs of an exported model of any format, from raw items of its data set and the JSON next to it.

    Example:
        >>> exported_inputs("models/client_1.onnx", "new_patients.csv")  # doctest: +SKIP

    Args:
        path: The model, or its JSON.
        inputs: For a model of a table, a DataFrame or the path of a CSV or Parquet file, with the columns of features;
            else a batch (N, ...), which is normalized.

    Returns:
        float32 of shape (N, ...).

    Raises:
        ConfigurationError: They are not what the model was trained on.
        ValueError: A column is missing, or has text in the place of numbers.
    """
    from pfl_lightning.datamodules.clients.batches import BatchTransform  # which know of no federation
    from pfl_lightning.datamodules.datasets.columns import TableEncoding
    from pfl_lightning.datamodules.datasets.table import encoded

    about = description(path)
    is_table = hasattr(inputs, "columns") or isinstance(inputs, str | Path)
    if "table" not in about or is_table != (about["table"] is not None):
        expected = "rows with its columns, a DataFrame or a path" if about.get("table") else "a batch (N, ...)"
        raise ConfigurationError(
            f"{path}: expected {expected}, got a {type(inputs).__name__}; an export by an earlier version does not "
            "list columns: export the client again"
        )
    if is_table:
        return encoded(TableEncoding.of(about["table"]), inputs, (about["table"].get("client"), about["name"]))
    given, shape = torch.as_tensor(inputs), about["input_shape"]
    if shape is not None and [*given.shape[1:]] != shape:
        expected = f"(N, {', '.join(map(str, shape))})"
        raise ConfigurationError(f"{path}: expected inputs of shape {expected}, got {tuple(given.shape)}")
    mean, std = (None if about[name] is None else tuple(about[name]) for name in ("mean", "std"))
    return BatchTransform(mean, std).normalize(given)


# ---------------------------------------------------------------------- graphs


def _batch_of(federation: Federation, client: int) -> Tensor:
    """Normalized inputs of the client's data, on the CPU."""
    parts = federation.data.client_data(client)
    piece = next((parts.test if len(parts.test) else parts.train).split(BATCH))
    inputs: Tensor = federation.environment.precision.convert_input(piece.loader(BATCH).tensors()[0])
    return inputs


def _write_graph(
    federation: Federation, client: int, model: Any, names: Iterable[str], format: str, path: Path
) -> None:
    who = named_clients([client], names_of(federation.data))
    who = f"{who}: the model of {federation.method_name} cannot be exported as {format}"
    if not isinstance(model, FederatedClient):
        raise ConfigurationError(
            f"{who}: it is your own {type(model).__name__}, whose inputs only you know: export "
            f"federation.client_model({client}) with torch.export.export or torch.onnx.export, or format='state_dict'"
        )
    if model.uses_knn_evaluation():
        raise ConfigurationError(f"{who}: no head was trained; export personalized clients (--personalize)")
    onnx: Any = _onnx_runtime() if format == "onnx" else None
    inputs, surplus = _batch_of(federation, client), {*model.state_dict()} - {*names}
    model.cpu().eval().requires_grad_(False)
    for prefix, layer in model.named_modules():  # what the prediction does not use
        held: dict[str, Any]
        for held in (layer._parameters, layer._buffers):
            for own, tensor in held.items():
                if f"{prefix}.{own}".lstrip(".") in surplus or (tensor is not None and not tensor.numel()):
                    held[own] = None
    try:
        with torch.no_grad():
            expected = model(inputs)
            example = torch.cat([inputs, inputs])  # of one sample alone the number would be taken for fixed
            run: Any
            if onnx is None:
                sizes = ({0: torch.export.Dim.AUTO},)
                program = torch.export.export(model, (example,), dynamic_shapes=sizes)
                held_in = io.BytesIO()  # torch warns of a path that does not end as its own
                torch.export.save(program, held_in)
                path.write_bytes(held_in.getvalue())
                run = torch.export.load(held_in).module()
            else:
                options: Any = {"input_names": ["inputs"], "output_names": ["scores"], "external_data": False}
                torch.onnx.export(
                    model, (example,), path, dynamo=True, dynamic_shapes=({0: "batch"},), verbose=False, **options
                )
                session = onnx.InferenceSession(path, providers=["CPUExecutionProvider"])
                run = lambda batch: torch.from_numpy(session.run(None, {"inputs": batch.numpy()})[0])  # noqa: E731
            found = [run(inputs), run(inputs[:1])]
    except Exception as error:  # of any operation of the network
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        other = "state_dict" if onnx is None else "torch_export"
        raise ConfigurationError(f"{who} ({lines[0]}); try format={other!r}") from error
    for scores in found:
        if not torch.allclose(scores, expected[: len(scores)], TOLERANCE, TOLERANCE, equal_nan=True):
            apart = float((scores - expected[: len(scores)]).abs().max())
            raise ConfigurationError(
                f"{who}: the file's scores on its data differ from the model's by {apart:.2g}: do not use it"
            )


def _onnx_runtime() -> Any:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  # what torch.onnx.export needs
    except ImportError as error:
        raise ConfigurationError("format='onnx' needs onnx: pip install 'pfl-lightning[onnx]'") from error
    return onnxruntime
