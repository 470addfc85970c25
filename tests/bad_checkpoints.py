"""Bad places for checkpoints and for exports; rows of the table in `bad_specs.py`."""

from tests.good_spec import BadSpec

_CHECKPOINT = ("spec", "checkpoint")

BAD_CHECKPOINTS = (
    *(
        BadSpec(
            f"checkpoints at {why}",
            {_CHECKPOINT: {"path": path}},
            "spec.checkpoint.path",
            "of a bucket",
            shows=f"'{path}'",
        )
        for why, path in {
            "a folder": "/data/checkpoints",
            "another kind of store": "hdfs://name/path",
            "an address without a bucket": "s3://",
            "no name of a bucket": "s3://-/prefix",
            "a slash at the end": "s3://bucket/prefix/",
            "an empty segment": "gs://bucket//prefix",
            "a parent": "s3://bucket/../prefix",
        }.items()
    ),
    *(
        BadSpec(
            f"exports to {why}",
            {_CHECKPOINT: {"exportTo": address}},
            "spec.checkpoint.exportTo",
            "or of a repository",
            shows=f"'{address}'",
        )
        for why, address in {
            "a folder": "/data/models",
            "a repository without an organisation": "hf://products",
            "a folder of a repository": "hf://team/products/step-8",
            "a revision of a repository": "hf://team/products@main",
            "a slash at the end": "s3://bucket/models/",
        }.items()
    ),
    BadSpec(
        "a target without exports",
        {_CHECKPOINT: {"export": "Never", "exportTo": "hf://team/products"}},
        "spec.checkpoint.exportTo",
        "set checkpoint.export to Final or Each",
        shows="'hf://team/products'",
    ),
    *(
        BadSpec(
            f"exports {where} the checkpoints",
            {_CHECKPOINT: {"path": "s3://bucket/job", "exportTo": address}},
            "spec.checkpoint.exportTo",
            "use another prefix",
            shows=f"'{address}'",
        )
        for where, address in {"among": "s3://bucket/job", "below": "s3://bucket/job/models"}.items()
    ),
)
