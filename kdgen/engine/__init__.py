"""Models of the DeepSeek-V3 family: what one is, where its weights are, and what it computes by definition.

    config.py           a model's configuration, read from and written as Hugging Face's config.json
    hf_config.py        the keys of config.json: which are read, which may be skipped, which combinations are refused
    hf_quantization.py  its key `quantization_config`
    hf_section.py       reading JSON objects key by key
    inventory.py        the tensors that a configuration calls for
    tensor_source.py    where tensors lie: safetensors files, a KDTR file, memory
    checkpoint.py       a model that has been opened: its configuration, and its tensors, checked against it
    random_model.py     weights from a seed, and writing models in both formats
    reference.py        the forward pass in float64, to compare kernels with

KDTR files are read with numpy alone; directories of safetensors need the package `safetensors` as well.
"""
