// What a warp collective computes once all its lanes have arrived. Included by `host_runtime.cpp` alone.
#pragma once

namespace kd {
namespace {

float widen(u32 bf16_bits) {
  const u32 bits = bf16_bits << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// A shuffle's lane reads another's value; a source outside the mask or the warp gives the lane its own.
template <class T> void shuffle(const void* const* in, void* const* out, u32 mask, u32 kind) {
  struct In {
    T value;
    u32 operand;
  };
  T values[32];
  for (u32 lane = 0; lane < 32; lane++)
    if (mask >> lane & 1) values[lane] = static_cast<const In*>(in[lane])->value;
  for (u32 lane = 0; lane < 32; lane++)
    if (mask >> lane & 1) {
      const u32 operand = static_cast<const In*>(in[lane])->operand;
      u32 source = lane;
      switch (kind) {
        case 0: source = operand & 31; break;
        case 1: source = lane ^ (operand & 31); break;
        case 2: source = operand <= lane ? lane - operand : lane; break;
        default: source = operand < 32 - lane ? lane + operand : lane; break;
      }
      if (!(mask >> source & 1)) source = lane;
      std::memcpy(out[lane], &values[source], sizeof(T));
    }
}

// Row `row` of matrix `m` is the 16 bytes that lane 8m + row points at.
template <bool transpose> void load_matrices(const void* const* in, void* const* out, u32 count) {
  for (u32 m = 0; m < count; m++) {
    u16 matrix[8][8];
    for (u32 row = 0; row < 8; row++) {
      const u8* address;
      std::memcpy(&address, in[m * 8 + row], sizeof address);
      std::memcpy(matrix[row], address, 16);
    }
    for (u32 lane = 0; lane < 32; lane++) {
      const u32 g = lane >> 2, t = lane & 3;
      const u32 low = transpose ? matrix[2 * t][g] : matrix[g][2 * t], high = transpose ? matrix[2 * t + 1][g] : matrix[g][2 * t + 1];
      static_cast<u32*>(out[lane])[m] = high << 16 | low;
    }
  }
}

}  // namespace

void execute_shfl_4(const void* const* in, void* const* out, u32 mask, u32 kind) { shuffle<u32>(in, out, mask, kind); }
void execute_shfl_8(const void* const* in, void* const* out, u32 mask, u32 kind) { shuffle<u64>(in, out, mask, kind); }

void execute_ballot(const void* const* in, void* const* out, u32 mask, u32) {
  u32 votes = 0;
  for (u32 lane = 0; lane < 32; lane++)
    if (mask >> lane & 1 && *static_cast<const u32*>(in[lane])) votes |= 1u << lane;
  for (u32 lane = 0; lane < 32; lane++)
    if (mask >> lane & 1) *static_cast<u32*>(out[lane]) = votes;
}

void execute_reduce(const void* const* in, void* const* out, u32 mask, u32 kind) {
  u32 total = kind == 1 ? 0xffffffffu : 0;
  for (u32 lane = 0; lane < 32; lane++)
    if (mask >> lane & 1) {
      const u32 value = *static_cast<const u32*>(in[lane]);
      switch (kind) {
        case 0: total = value > total ? value : total; break;
        case 1: total = value < total ? value : total; break;
        case 2: total += value; break;
        default: total |= value; break;
      }
    }
  for (u32 lane = 0; lane < 32; lane++)
    if (mask >> lane & 1) *static_cast<u32*>(out[lane]) = total;
}

void execute_ldmatrix(const void* const* in, void* const* out, u32, u32 count) { load_matrices<false>(in, out, count); }
void execute_ldmatrix_trans(const void* const* in, void* const* out, u32, u32 count) { load_matrices<true>(in, out, count); }

void execute_movmatrix(const void* const* in, void* const* out, u32, u32) {
  u32 matrix[8][8];
  for (u32 lane = 0; lane < 32; lane++) {
    const u32 value = *static_cast<const u32*>(in[lane]), g = lane >> 2, t = lane & 3;
    matrix[g][2 * t] = value & 0xffff;
    matrix[g][2 * t + 1] = value >> 16;
  }
  for (u32 lane = 0; lane < 32; lane++) {
    const u32 g = lane >> 2, t = lane & 3;
    *static_cast<u32*>(out[lane]) = matrix[2 * t + 1][g] << 16 | matrix[2 * t][g];
  }
}

// Products are exact in fp32; they are added in ascending k, each sum rounded. A tensor core adds in another order and with other
// roundings, so results agree within a bound, not in bits; what both keep is that a column depends on its own column of B alone.
void execute_mma_bf16(const void* const* in, void* const* out, u32, u32) {
  struct In {
    const u32 *a, *b;
  };
  float a[16][16], b[16][8], c[16][8];
  for (u32 lane = 0; lane < 32; lane++) {
    const In* x = static_cast<const In*>(in[lane]);
    const float* mine = static_cast<const float*>(out[lane]);
    const u32 g = lane >> 2, t = lane & 3;
    for (u32 r = 0; r < 4; r++) {
      float* to = &a[g + (r & 1) * 8][2 * t + (r >> 1) * 8];
      to[0] = widen(x->a[r] & 0xffff), to[1] = widen(x->a[r] >> 16);
      c[g + (r >> 1) * 8][2 * t + (r & 1)] = mine[r];
    }
    for (u32 r = 0; r < 2; r++) b[2 * t + 8 * r][g] = widen(x->b[r] & 0xffff), b[2 * t + 8 * r + 1][g] = widen(x->b[r] >> 16);
  }
  for (u32 i = 0; i < 16; i++)
    for (u32 k = 0; k < 16; k++)
      for (u32 j = 0; j < 8; j++) c[i][j] += a[i][k] * b[k][j];
  for (u32 lane = 0; lane < 32; lane++) {
    float* mine = static_cast<float*>(out[lane]);
    const u32 g = lane >> 2, t = lane & 3;
    for (u32 r = 0; r < 4; r++) mine[r] = c[g + (r >> 1) * 8][2 * t + (r & 1)];
  }
}

}  // namespace kd
