-- Shared by admit.lua and settle.lua: reads and writes what a holder of limits has used. The Python twin is rules.py.
-- A holder is a hash with these fields: when its buckets of requests (r) and tokens (t) are full again, the seconds that were
-- returned to each (rb, tb), the current day (d) with its tokens and cost (dt, dc), another day (od, odt, odc), and the same of
-- the months (m, mt, mc, om, omt, omc). Gateways of other versions read these fields: never change what one means.
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1000000
local FIELDS = {'r', 't', 'rb', 'tb', 'd', 'dt', 'dc', 'od', 'odt', 'odc', 'm', 'mt', 'mc', 'om', 'omt', 'omc'}

local function read_holder(key)
  local values, holder = redis.call('HMGET', key, unpack(FIELDS)), {}
  for i, name in ipairs(FIELDS) do holder[name] = tonumber(values[i] or 0) end
  return holder
end

-- Seconds after which the hash means nothing any more.
local function lifetime(holder)
  if holder.m ~= 0 then return 70 * 86400 end
  if holder.d ~= 0 then return 3 * 86400 end
  return math.ceil(math.max(holder.r - now, holder.t - now, 0)) + 120
end

local function write_holder(key, holder)
  local values = {}
  for i, name in ipairs(FIELDS) do
    -- Days and months are written only if the holder has limits on them.
    if i <= 4 or (i <= 10 and holder.d ~= 0) or (i > 10 and holder.m ~= 0) then
      values[#values + 1] = name
      values[#values + 1] = string.format('%.17g', holder[name])
    end
  end
  redis.call('HSET', key, unpack(values))
  redis.call('EXPIRE', key, lifetime(holder))
end

-- Take seconds from a bucket: rules._settle_bucket, and the buckets in rules.admit.
local function take_from_bucket(holder, bucket, seconds)
  if seconds > 0 then holder[bucket] = math.max(holder[bucket], now) + seconds end
end
