"""Write the test vectors of the checkpoint format. They are committed and stay: old files must remain readable."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import forge

from distmd_protocol import load_checkpoint, save_checkpoint
from distmd_protocol.dtypes import BY_NAME
from distmd_protocol.testkit import run_ranks

FOLDER = Path(__file__).parent / "checkpoints"
SHARD = "shard-00000-of-00001.safetensors"


def save(path, arrays, **options):
    """Save as the first release would."""
    return save_checkpoint(path, arrays, packages={"distmd-protocol": "0.1.0"}, **options).wait()


def every_type():
    """Return an array of each type that numpy has, and odd shapes."""
    arrays = {f"types/{name}": np.arange(3).astype(stored.carrier) for name, stored in BY_NAME.items()}
    arrays["types/bool"] = np.array([True, False, True])
    arrays |= {
        "shapes/scalar": np.array(-1.5),
        "shapes/empty": np.zeros((0, 3)),
        "shapes/cube": np.arange(8.0).reshape(2, 2, 2),
    }
    arrays |= {"special": np.array([np.nan, np.inf, -0.0, 5e-324]), "names/mlp~1~0~1linear_0/w": np.ones(2, np.float32)}
    return arrays


def sharded(comm, folder):
    """Write one shard a rank."""
    arrays = {"x": np.full((comm.rank + 1, 3), float(comm.rank)), "step": np.array(7)}
    save(f"{folder}/sharded", arrays, kind="dynamics", step=7, comm=comm, replicated=False, meta={"n": None})


def accepted(folder):
    """Write what must be read, and what is in it."""
    save(folder / "replicated", every_type(), kind="test", step=3, meta={"text": "Å", "list": [1, 2.5, None]})
    save(folder / "no-arrays", {}, kind="test", step=0)
    save(folder / "prng-key", {"rng": np.array([0, 42], np.uint32)}, kind="test", step=0)
    forge.change_manifest(folder / "prng-key", lambda content: content["arrays"][0].update(prng="threefry2x32"))
    run_ranks(sharded, 2, str(folder))
    expected = {}
    for path in sorted(folder.iterdir()):
        shards = len(load_checkpoint(path, shard=0).manifest.shards)
        expected[path.name] = [
            {
                key: {"dtype": a.layout.dtype, "shape": list(a.layout.shape), "hex": a.data.tobytes().hex()}
                for key, a in load_checkpoint(path, shard=shard).stored.items()
            }
            for shard in range(shards)
        ]
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def refused(folder):
    """Write what must not be read."""

    def fresh(name):
        return save(folder / name, {"a": np.arange(4.0)}, kind="test", step=1)

    def damage(name, file, change):
        path = fresh(name) / file
        path.write_bytes(change(path.read_bytes()))

    damage("manifest-truncated", "manifest.json", lambda data: data[:-10])
    damage("manifest-byte-flipped", "manifest.json", lambda data: data.replace(b'"step":1', b'"step":2'))
    damage("manifest-with-newline", "manifest.json", lambda data: data + b"\n")
    damage("shard-truncated", SHARD, lambda data: data[:-1])
    damage("shard-byte-flipped", SHARD, lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    damage("shard-header-byte-flipped", SHARD, lambda data: data.replace(b'"a"', b'"b"'))
    change = forge.change_manifest
    change(fresh("shard-name-with-dots"), lambda c: c["shards"][0].update(name="../shard-name-with-dots/" + SHARD))
    change(fresh("shard-name-absolute"), lambda c: c["shards"][0].update(name="/etc/hostname"))
    change(fresh("not-complete"), lambda c: c.update(complete=False))
    change(fresh("version-2"), lambda c: c.update(version=2))
    change(fresh("wrong-shape"), lambda c: c["arrays"][0].update(shape=[2, 2]))
    change(fresh("array-missing-in-manifest"), lambda c: c.update(arrays=[]))

    def text(name, old, new):
        path = fresh(name)
        body = json.dumps(forge.read_content(path), separators=(",", ":")).encode()
        (path / "manifest.json").write_bytes(forge.manifest_bytes(body.replace(old, new)))

    text("json-duplicate-name", b'"step":1', b'"step":1,"step":1')
    text("json-nan", b'"step":1', b'"step":1,"x":NaN')
    text("json-infinite-number", b'"step":1', b'"step":1,"x":1e999')

    def header(name, table, data, length=None):
        forge.put_shard(fresh(name), forge.shard_bytes(table, data, length))

    one = {"dtype": "F64", "shape": [4], "data_offsets": [0, 32]}
    header("header-of-2-to-the-60", {"a": one}, bytes(32), 2**60)
    header("header-gap", {"a": {**one, "data_offsets": [8, 40]}}, bytes(40))
    header("header-trailing-bytes", {"a": one}, bytes(40))
    header("header-duplicate-name", b'{"a":%s,"a":%s}' % ((json.dumps(one).encode(),) * 2), bytes(32))


def main():
    """Write all vectors anew."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    for name, write in (("accepted", accepted), ("refused", refused)):
        (FOLDER / name).mkdir(parents=True)
        write(FOLDER / name)


if __name__ == "__main__":
    main()
