"""Wrong calls of QuantizedTensor, TensorProto, hop.storage, hop.checkpoint and hop.decompositions."""

import tempfile
from pathlib import Path

import torch

import hop
from hop import checkpoint, presets, storage
from tests.support.wrong_calls.row import each, floats, int8, rows, wrong

ROW, F32 = presets.INT8_ROW, torch.float32
FOLDER = Path(tempfile.gettempdir()) / "hop-wrong-calls"  # that there is none of
FILE = FOLDER / "a.safetensors"
SHAPE = "give one such as (2, 4)"


def tensor(buffers=None, quantizer=ROW, shape=(2, 4), dtype=F32, **options):
    return hop.QuantizedTensor(rows(2, 4).buffers() if buffers is None else buffers, quantizer, shape, dtype, **options)


TENSORS = [
    wrong("tensor_quantizer", TypeError, lambda: tensor(quantizer="INT8_ROW"),
          "quantizer | 'INT8_ROW' | must be a Quantizer | give one such as hop.presets.INT8_ROW"),
    *each(wrong, TypeError, "dtype | must be floating point | use one of them", {
        "tensor_dtype": ("torch.int8", lambda: tensor(dtype=torch.int8)),
        "tensor_dtype_text": ("'float32'", lambda: tensor(dtype="float32")),
    }),
    *each(wrong, TypeError, f"shape | must be a tuple of integers | {SHAPE}", {
        "tensor_shape": ("4", lambda: tensor(shape=4)),
        "tensor_shape_float": ("(2, 4.0)", lambda: tensor(shape=(2, 4.0))),
        "proto_shape": ("3", lambda: hop.TensorProto(3)),
    }),
    *each(wrong, TypeError, "buffers | must be a mapping from names to tensors | give one such as t.buffers()", {
        "tensor_buffers_list": ("[a tensor", lambda: tensor([int8(2, 4), floats(2, 1)])),
        "tensor_buffers_none": ("None", lambda: hop.QuantizedTensor(None, ROW, (2, 4), F32)),
    }),
    wrong("tensor_buffers_names", ValueError, lambda: tensor({"codes": int8(2, 4)}),
          "buffers | got ['codes'] | must be ['codes', 'scale'], in this order | give all of them"),
    wrong("tensor_buffer_shape", ValueError, lambda: tensor(shape=(2, 5)),
          "codes | (2, 4) | must be torch.int8 of (2, 5) | give such a tensor"),
    *each(wrong, ValueError, "codes | must be torch.int8 of (2, 4) | give such a tensor", {
        "tensor_buffer_dtype": ("torch.float32", lambda: tensor({"codes": floats(2, 4), "scale": floats(2, 1)})),
        "tensor_set_codes": ("torch.float32", lambda: setattr(rows(2, 4), "codes", floats(2, 4))),
    }),
    wrong("tensor_buffer_list", TypeError, lambda: tensor({"codes": [1], "scale": floats(2, 1)}),
          "codes | [1] | must be a tensor | give such a tensor"),
    wrong("tensor_buffer_device", ValueError, lambda: tensor({"codes": int8(2, 4), "scale": floats(2, 1).to("meta")}),
          "scale | meta | must be on cpu | move it there"),
    wrong("tensor_buffer_sparse", ValueError, lambda: tensor({"codes": int8(2, 4).to_sparse(), "scale": floats(2, 1)}),
          "codes | torch.sparse_coo | must be dense | use to_dense()"),
    wrong("tensor_requires_grad", ValueError, lambda: tensor(requires_grad="x"),
          "requires_grad | 'x' | must be True or False | give one of them"),
    wrong("tensor_set_scale", TypeError, lambda: setattr(rows(2, 4), "scale", 1.0),
          "scale | 1.0 | must be a tensor | give such a tensor"),
    wrong("tensor_set_data", TypeError, lambda: setattr(rows(2, 4), "data", floats(2, 4)),
          "data | torch.float32 | must be another | use copy_ to quantize plain values"),
    wrong("tensor_resize", NotImplementedError, lambda: rows(2, 4).resize_(3),
          "QuantizedTensor | aten.resize_.default | has no rule | call hop.dequantize first"),
    wrong("proto_shape_negative", ValueError, lambda: hop.TensorProto((-1,)),
          f"shape | (-1,) | must have sizes of 0 or more | {SHAPE}"),
    wrong("proto_dtype", TypeError, lambda: hop.TensorProto((2,), "float32"),
          "dtype | 'float32' | must be a torch.dtype | give one such as torch.float32"),
    wrong("proto_device", ValueError, lambda: hop.TensorProto((2,), device="gpu"),
          "device | 'gpu' | must be one that PyTorch knows | give one such as 'cuda'"),
    wrong("proto_device_number", TypeError, lambda: hop.TensorProto((2,), device=3),
          "device | 3 | must be a torch.device or its name | give one such as 'cuda'"),
    wrong("proto_device_quantizer", TypeError, lambda: hop.TensorProto((2,), F32, ROW),
          "device | Quantizer(format=int8 | is a quantizer | pass it as quantizer="),
    wrong("proto_requires_grad", TypeError, lambda: hop.TensorProto((2,), requires_grad=1),
          "requires_grad | 1 | must be True or False | give one of them"),
    wrong("proto_requires_grad_of_integers", ValueError, lambda: hop.TensorProto((2,), torch.int8, requires_grad=True),
          "requires_grad | torch.int8 | is for floats | leave it out"),
    *each(wrong, ValueError, "usages | must name one or both of | use one of them, or both", {
        "proto_usages": ("'rows'", lambda: hop.TensorProto((2,), quantizer=ROW, usages="rows")),
        "proto_no_usage": ("()", lambda: hop.TensorProto((2, 4), quantizer=ROW).update_usage(rowwise=False)),
    }),
    wrong("proto_quantizer", TypeError, lambda: hop.TensorProto((2,), quantizer="INT8_ROW"),
          "quantizer | 'INT8_ROW' | must be a Quantizer or None | give one such as hop.presets.INT8_ROW"),
    wrong("proto_of_list", TypeError, lambda: hop.TensorProto.of([1]),
          "tensor | [1] | must be a tensor | make one with torch.tensor"),
    wrong("proto_create", ValueError, lambda: hop.TensorProto((2,)).create_tensor([floats(3)]),
          "data | (3,) | must be torch.float32 of (2,) | give such a tensor"),
    wrong("proto_create_number", ValueError, lambda: hop.TensorProto((2, 4), quantizer=ROW).create_tensor([int8(2, 4)]),
          "buffers | got 1 | must be ['codes', 'scale'] | give a list of these"),
]  # fmt: skip

FILES = [
    wrong("save_list", TypeError, lambda: storage.save_file([floats(2)], FILE),
          "tensors | [a tensor | must be a mapping from names to tensors | give one such as model.state_dict()"),
    wrong("save_module", TypeError, lambda: storage.save_file(torch.nn.Linear(2, 2), FILE),
          "tensors | Linear(in_features=2 | must be a mapping from names to tensors | "
          "give one such as model.state_dict()"),
    wrong("save_number", TypeError, lambda: storage.save_file({"a": [1]}, FILE),
          "tensors['a'] | [1] | must be a tensor | make one with torch.tensor"),
    wrong("save_name", TypeError, lambda: storage.save_file({1: floats(2)}, FILE),
          "tensors | 1 | names must be text | rename it"),
    wrong("save_meta", ValueError, lambda: storage.save_file({"a": floats(2).to("meta")}, FILE),
          "tensors['a'] | meta | must have data | load it first"),
    wrong("save_metadata_key", ValueError, lambda: storage.save_file({"a": floats(2)}, FILE, {"hop": "x"}),
          "metadata | 'hop' | is reserved | rename it"),
    wrong("save_metadata_value", TypeError, lambda: storage.save_file({"a": floats(2)}, FILE, {"x": 3}),
          "metadata | {'x': 3} | must be a mapping from text to text | give one such as {'version': '1'}"),
    wrong("save_collision", ValueError, lambda: storage.save_file({"a": rows(2, 4), "a:codes": floats(2)}, FILE),
          "tensors | 'a:codes' | two tensors would be called | rename 'a:codes'"),
    *each(wrong, TypeError, "path | must be text or a pathlib.Path | give one such as 'model.safetensors'", {
        "save_path": ("3", lambda: storage.save_file({"a": floats(2)}, 3)),
        "load_path": ("None", lambda: storage.load_file(None)),
    }),
    wrong("save_no_folder", FileNotFoundError, lambda: storage.save_file({"a": floats(2)}, FILE),
          "path | a.safetensors | must be in an existing folder | create the folder first"),
    wrong("load_no_file", FileNotFoundError, lambda: storage.load_file(FILE),
          "path | a.safetensors | must be an existing file | save one with hop.storage.save_file"),
    wrong("load_device", ValueError, lambda: storage.load_file(FILE, device="gpu"),
          "device | 'gpu' | must be one that PyTorch knows | give one such as 'cuda'"),
    *each(wrong, ValueError, "step | must be an integer of 0 or more | give one such as 0", {
        "checkpoint_step": ("-1", lambda: checkpoint.save({"a": floats(2)}, FOLDER, step=-1)),
        "checkpoint_step_text": ("'3'", lambda: checkpoint.save({"a": floats(2)}, FOLDER, step="3")),
    }),
    wrong("checkpoint_keep", ValueError, lambda: checkpoint.save({"a": floats(2)}, FOLDER, step=1, keep=0),
          "keep | 0 | must be an integer of 1 or more | give None to keep all"),
    *each(wrong, TypeError, "state_dict | must be a dict | give one such as model.state_dict()", {
        "checkpoint_list": ("[a tensor", lambda: checkpoint.save([floats(2)], FOLDER, step=1)),
        "checkpoint_load_none": ("None", lambda: checkpoint.load(None, FOLDER)),
    }),
    *each(wrong, TypeError, "folder | must be text or a pathlib.Path | give one such as 'checkpoints'", {
        "checkpoint_folder": ("None", lambda: checkpoint.save({"a": floats(2)}, None, step=1)),
        "checkpoint_steps": ("None", lambda: checkpoint.steps(None)),
    }),
    wrong("checkpoint_load_step", ValueError, lambda: checkpoint.load({"a": floats(2)}, FOLDER, step="1"),
          "step | '1' | must be an integer of 0 or more | give None for the last"),
    wrong("checkpoint_load_nothing", FileNotFoundError, lambda: checkpoint.load({"a": floats(2)}, FOLDER),
          "folder | hop-wrong-calls | has no checkpoint | save one first"),
    *each(wrong, TypeError, "keep | must be a list | give a list of one", {
        "decompositions_text": ("'hop_scaled'", lambda: hop.decompositions(keep="hop_scaled")),
        "decompositions_none": ("None", lambda: hop.decompositions(keep=None)),
    }),
    wrong("decompositions_name", ValueError, lambda: hop.decompositions(keep=["scaledd"]),
          "keep | 'scaledd' | must name operators of ours | use such names"),
    wrong("decompositions_native", ValueError, lambda: hop.decompositions(native="yes"),
          "native | 'yes' | must be True or False | give one of them"),
]  # fmt: skip
