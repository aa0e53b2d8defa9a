"""What of a real CUDA torch must work on the dry device. Prints {check: "ok" or the error}."""

import json
import traceback

import stub
import torch
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i, i < count) + tl.load(y_ptr + i, i < count), i < count)


def check_device():
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1
    free, total = torch.cuda.mem_get_info()
    assert 0 < free < total


def check_small_copies_are_made():
    assert torch.arange(10).cuda().cpu().tolist() == list(range(10))


def check_products_and_autograd():
    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    before = stub.launches()
    (x @ x).sum().backward()
    assert x.grad.shape == x.shape and x.grad.is_cuda
    assert stub.counts()["kernel"]["cublas gemm"] + stub.counts()["kernel"]["cublasLt matmul"] >= 3
    assert stub.launches() > before


def check_attention():
    q = torch.randn(1, 8, 512, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    backends = (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    )
    for backend in backends:
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
            out.backward(torch.ones_like(out))
    assert stub.counts()["kernel"]["cudnn graph"] >= 2


def check_streams_events_and_pinned_memory():
    side, event = torch.cuda.Stream(priority=-1), torch.cuda.Event()
    with torch.cuda.stream(side):
        x = torch.empty(1 << 20, pin_memory=True).to("cuda", non_blocking=True)
        event.record()
    torch.cuda.current_stream().wait_event(event)
    event.synchronize()
    assert x.is_cuda and side.priority == -1
    assert stub.counts()["total"]["pageable_copies"] == 0


def check_memory_runs_out():
    GiB, before = 1 << 30, torch.cuda.memory_stats()["num_ooms"]
    try:
        kept = [torch.empty(8 * GiB, dtype=torch.uint8, device="cuda") for _ in range(64)]
        raise AssertionError(f"{len(kept)} x 8 GiB were allocated")
    except torch.OutOfMemoryError as error:
        assert "out of memory" in str(error)
    assert torch.cuda.memory_stats()["num_ooms"] == before + 1
    torch.empty(60 * GiB, dtype=torch.uint8, device="cuda")  # freed memory is there again
    assert torch.cuda.max_memory_allocated() >= 60 * GiB


def check_triton():
    x = torch.ones(1000, device="cuda")
    compiled = add_kernel[(8,)](x, x, torch.empty_like(x), 1000, BLOCK=128)
    assert "cubin" in compiled.asm
    assert stub.counts()["kernel"]["add_kernel"] == 1


def check_a_launch_that_no_card_takes_is_refused():
    before = stub.complaints()
    x = torch.ones(8, device="cuda")
    try:
        add_kernel[(1, 70000)](x, x, x, 8, BLOCK=8)
        raise AssertionError("a grid of 70,000 rows was launched")
    except RuntimeError as error:
        assert "invalid argument" in str(error)
    assert stub.complaints() == before + 1


def check_a_dead_pointer_is_seen():
    x = torch.ones(1 << 24, device="cuda")
    address = x.data_ptr() + (40 << 20)  # a page of the allocator that holds nothing else
    del x
    torch.cuda.empty_cache()
    before = stub.complaints()

    class Dead:
        dtype = torch.float32

        def data_ptr(self):
            return address

    y = torch.ones(8, device="cuda")
    add_kernel[(1,)](Dead(), y, y, 8, BLOCK=8)
    assert stub.complaints() > before


def check_host_waits_have_stacks():
    x = torch.ones(8, device="cuda")
    with stub.HostWaits() as waits:
        x.sum().item()
    ((_, stack), count), *others = waits.found.items()
    assert count == 1 and not others and "check_host_waits_have_stacks" in stack


def check_optimizers_and_grouped_products():
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    x.grad = torch.ones_like(x)
    torch.optim.AdamW([x], fused=True).step()
    if torch.cuda.get_device_capability() == (9, 0):
        bf16 = {"device": "cuda", "dtype": torch.bfloat16}
        ends = torch.tensor([16, 32, 48, 64], device="cuda", dtype=torch.int32)
        out = torch._grouped_mm(torch.randn(64, 64, **bf16), torch.randn(4, 64, 64, **bf16), ends)
        assert out.shape == (64, 64)


def check_the_log_has_an_order():
    from pathlib import Path
    from tempfile import TemporaryDirectory

    import order

    host = torch.empty(1 << 22, dtype=torch.uint8, pin_memory=True)
    side = torch.cuda.Stream()
    with TemporaryDirectory() as folder:
        for waits in (True, False):
            path = Path(folder) / f"{waits}.txt"
            stub.log_to(path)
            x = torch.zeros(1 << 22, dtype=torch.uint8, device="cuda")  # an ATen kernel writes it
            if waits:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                host.copy_(x, non_blocking=True)
            stub.log_to(None)
            torch.cuda.synchronize()
            found = order.conflicts(path)
            assert sum(found.seen.values()) == 1, found
            assert bool(found.races()) != waits, found


def main() -> None:
    answers = {}
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            stub.reset()
            try:
                check()
                answers[name.removeprefix("check_")] = "ok"
            except Exception:
                answers[name.removeprefix("check_")] = traceback.format_exc()
    print("\n" + json.dumps(answers))


if __name__ == "__main__":
    main()
