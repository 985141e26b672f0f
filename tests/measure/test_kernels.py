"""Names of kernels that ran on an H200 (PyTorch 2.11, CUDA 13.0), and what they say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tilefit.measure.kernels import short_name

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import kernels


@pytest.mark.parametrize(
    ("name", "family", "tile", "layout"),
    [
        ("nvjet_sm90_tst_192x144_64x5_1x2_h_bz_coopB_bias_TNT", "sm90", (144, 192), "TN"),
        ("nvjet_hsh_64x32_64x16_2x4_h_bz_NTT", "sm90", (32, 64), "NT"),
        ("nvjet_sm90_qqtst_48x64_128x15_4x1_v_bz_algo2_splitK_TNN", "sm90", (64, 48), "TN"),
        ("cutlass_80_tensorop_bf16_s16816gemm_bf16_128x256_64x3_tn_align2", "sm80", (256, 128), "TN"),
        ("cutlass_80_wmma_tensorop_f16_s161616gemm_f16_32x32_128x2_tn_align2", "sm80", (32, 32), "TN"),
        ("cutlass_75_tensorop_s1688gemm_bf16_64x64_nt_align1", "sm75", (64, 64), "NT"),
        ("cutlass_80_simt_sgemm_128x32_8x5_nn_align1", "simt", (32, 128), "NN"),
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_nt_n_tilesize128x32x8_stage3_warpsize2x2x1_ffma_aligna4",
            "simt",
            (128, 32),
            "NT",
        ),
        (
            "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize256x64x32_warpgroupsize1x1x1_execute_kernel",
            "sm90",
            (256, 64),
            "TN",
        ),
        ("ampere_sgemm_128x64_tn", "simt", (64, 128), "TN"),
        ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_32x6_tn", "sm80", (64, 128), "TN"),
        ("cutlass_tensorop_f16_s1688fprop_optimized_f16_64x64_32x2", "sm75", None, ""),
        ("gemv2T_kernel_val", "gemv", None, ""),
        ("gemmSN_NN_kernel", "gemv", None, ""),
        ("flash_fwd_kernel", "flash", None, ""),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128",
            "cudnn-attention",
            None,
            "",
        ),
        ("vectorized_elementwise_kernel<CUDAFunctor_add>", "", None, ""),
    ],
)
def test_family_tile_and_layout(name: str, family: str, tile: tuple[int, int] | None, layout: str) -> None:
    kernel = kernels.parse(name)
    assert (kernel.family, kernel.tile, kernel.layout) == (family, tile, layout)


def test_stages_cluster_and_split_of_nvjet() -> None:
    kernel = kernels.parse("nvjet_sm90_tst_64x24_64x16_1x4_h_bz_splitK_NNT")
    assert (kernel.tile_k, kernel.stages, kernel.cluster, kernel.split_k) == (64, 16, (4, 1), True)


def test_alignment_of_cutlass() -> None:
    assert kernels.parse("cutlass_80_tensorop_s16816gemm_bf16_128x64_64x6_nn_align8").align == 8


@pytest.mark.parametrize(
    ("demangled", "short"),
    [
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_64x64_32x6_tn_align2>"
            "(cutlass_80_tensorop_bf16_s16816gemm_bf16_64x64_32x6_tn_align2::Params)",
            "cutlass_80_tensorop_bf16_s16816gemm_bf16_64x64_32x6_tn_align2",
        ),
        (
            "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16, float, "
            "cublasGemvParamsEx<int> >(cublasGemvParamsEx<int>)",
            "gemvx::kernel",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, "
            "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<c10::BFloat16>)",
            "vectorized_elementwise_kernel<CUDAFunctor_add>",
        ),
        (
            "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float)",
            "vectorized_layer_norm_kernel",
        ),
        (
            "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128> >(Params)",
            "flash_fwd_kernel",
        ),
    ],
)
def test_short_names(demangled: str, short: str) -> None:
    assert short_name(demangled) == short


def test_the_main_kernel_is_not_the_sum_of_a_split() -> None:
    launches = [("cutlass_80_tensorop_x", 3.0), ("splitKreduce_kernel", 5.0), ("Memset (Device)", 9.0)]
    assert kernels.main_kernel(launches) == "cutlass_80_tensorop_x"
    assert kernels.main_kernel([("Memset (Device)", 9.0)]) == "Memset (Device)"
